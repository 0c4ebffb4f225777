"""What is learnt, between engines: made from options, saved, and shared by replicas."""
