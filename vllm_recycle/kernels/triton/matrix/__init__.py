"""The adjacency matrix on a device: finding, learning, counting, seeding, growing."""
