"""What runs in vLLM, and imports it: entry point, configuration, scheduler, workers.

Of the rest of the package only what makes an engine imports it, in `cli`.

Each of vLLM's runners has a folder, `cpu` and `cuda`, which know nothing of each other; what both
share is beside them. What is vLLM's has its names; `vllm_recycle.core.req_states` says which.
"""
