"""The start of an engine: configuration, refusals, and where vLLM is replaced."""
