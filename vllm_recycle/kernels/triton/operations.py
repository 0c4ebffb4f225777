"""The set of operations in Triton."""

from __future__ import annotations

from vllm_recycle.core.operations import Operations
from vllm_recycle.kernels.triton.ouroboros.harvest import harvest
from vllm_recycle.kernels.triton.ouroboros.phrase_pool import insert_phrases, newest_phrases
from vllm_recycle.kernels.triton.top_k import update_from_logits
from vllm_recycle.kernels.triton.walk import fill_tree, walk

OPERATIONS = Operations(
    "triton", fill_tree, update_from_logits, walk, insert_phrases, newest_phrases, harvest
)
