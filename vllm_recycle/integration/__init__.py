"""The only part of the package that imports vllm: entry point, configuration, scheduler, workers.

Each of vLLM's runners has a folder, `cpu` and `cuda`, which know nothing of each other; what both
share is beside them. What is vLLM's has its names; `vllm_recycle.core.proposer` says which.
"""
