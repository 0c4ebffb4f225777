"""The operations of Ouroboros in Triton: a module that satisfies `PhraseOperations` of the core."""

from __future__ import annotations

from vllm_recycle.kernels.triton.ouroboros.harvest import harvest
from vllm_recycle.kernels.triton.ouroboros.phrase_pool import insert_phrases, newest_phrases
from vllm_recycle.kernels.triton.walk import walk

__all__ = ["harvest", "insert_phrases", "newest_phrases", "walk"]
