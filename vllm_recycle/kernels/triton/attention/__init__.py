"""Attention of tree rows to the paged KV cache and to each other."""
