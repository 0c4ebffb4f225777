"""The operations in plain torch: what is correct, and what runs where there is nothing faster.

A module that satisfies `vllm_recycle.core.operations.Operations`.
"""

from __future__ import annotations

from vllm_recycle.core.grow import fill, grow
from vllm_recycle.core.harvest import harvest
from vllm_recycle.core.learn import learn, seed, top_k
from vllm_recycle.core.phrase_pool import insert_phrases, newest_phrases
from vllm_recycle.core.price import choose
from vllm_recycle.core.verification import walk

name = "torch"

__all__ = [
    "choose",
    "fill",
    "grow",
    "harvest",
    "insert_phrases",
    "learn",
    "name",
    "newest_phrases",
    "seed",
    "top_k",
    "walk",
]
