"""The only part of the package that imports vllm: entry point, configuration, worker, runners."""
