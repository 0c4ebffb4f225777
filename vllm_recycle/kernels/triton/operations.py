"""The set of operations in Triton."""

from __future__ import annotations

from vllm_recycle.core.operations import Operations
from vllm_recycle.kernels.triton.harvest import harvest
from vllm_recycle.kernels.triton.learning import update_from_logits
from vllm_recycle.kernels.triton.nodes import fill_tree, walk
from vllm_recycle.kernels.triton.phrase_pool import insert_phrases, newest_phrases

OPERATIONS = Operations(
    "triton", fill_tree, update_from_logits, walk, insert_phrases, newest_phrases, harvest
)
