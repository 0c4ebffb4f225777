"""vLLM's GPU worker with a model runner that verifies trees."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_recycle.integration.gpu_backend import TreeFlashAttentionBackend
from vllm_recycle.integration.v2_runner import TreeModelRunner
from vllm_recycle.integration.worker import TreeWorker


class TreeGPUWorker(TreeWorker):
    """Model Runner V2 and FlashAttention, with trees."""

    runner_class = TreeModelRunner
    replaced_backend = AttentionBackendEnum.FLASH_ATTN
    tree_backend = TreeFlashAttentionBackend
