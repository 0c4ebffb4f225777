"""Trees on vLLM's Model Runner V2, which its CUDA engine uses."""
