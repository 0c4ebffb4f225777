"""The functions of growing and learning that have faster twins, and the set in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_recycle.core.grow import Growth, grow
from vllm_recycle.core.learn import learn, seed, top_k


@dataclass(frozen=True, slots=True)
class DynamicOperations:
    """See `growth` and `learning`, of which these are functions."""

    name: str
    grow: Callable[..., Growth]
    learn: Callable[..., None]
    seed: Callable[..., None]
    top_k: Callable[..., torch.Tensor]


REFERENCE_DYNAMIC = DynamicOperations("torch", grow, learn, seed, top_k)
