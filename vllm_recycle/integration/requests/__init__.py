"""What a request says, and what its client gets."""
