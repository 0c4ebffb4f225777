"""The only part of the package that imports vllm: entry point, configuration, scheduler, workers.

Each of vLLM's runners has a folder, `cpu` and `cuda`, which know nothing of each other; what both
share is beside them.
"""
