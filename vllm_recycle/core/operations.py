"""The functions of a step that have faster twins: a set of them, and the set in plain torch.

The torch functions define what is correct. `vllm_recycle.kernels` has sets with the same
signatures for other machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_recycle.core.adjacency import fill_tree, update_from_logits
from vllm_recycle.core.verification import WalkResult, walk


@dataclass(frozen=True, slots=True)
class Operations:
    """See `adjacency.fill_tree`, `adjacency.update_from_logits` and `verification.walk`."""

    name: str
    fill_tree: Callable[..., torch.Tensor]
    update_from_logits: Callable[..., None]
    walk: Callable[..., WalkResult]


REFERENCE = Operations("torch", fill_tree, update_from_logits, walk)
