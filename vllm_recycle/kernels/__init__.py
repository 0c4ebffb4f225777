"""Tree attention and KV moves, on the layouts that vLLM keeps its cache in, and `core`'s twins.

Each kind of kernel has a folder, `cpu` and `triton`, which know nothing of each other.
"""
