"""Tree attention and KV moves, on the layouts that vLLM keeps its cache in."""
