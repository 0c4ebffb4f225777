"""Trees on vLLM's V1 model runner, which its CPU engine uses."""
