"""The functions of a step that have faster twins: a set of them, and the set in plain torch.

The torch functions define what is correct. `vllm_recycle.kernels` has sets with the same
signatures for other machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_recycle.core.harvest import Phrases, harvest
from vllm_recycle.core.phrase_pool import insert_phrases, newest_phrases
from vllm_recycle.core.template_matrix import fill_tree, update_from_logits
from vllm_recycle.core.verification import WalkResult, walk


@dataclass(frozen=True, slots=True)
class Operations:
    """See `adjacency`, `verification`, `phrase_pool` and `harvest`, whose functions these are."""

    name: str
    fill_tree: Callable[..., torch.Tensor]
    update_from_logits: Callable[..., None]
    walk: Callable[..., WalkResult]
    insert_phrases: Callable[..., None]
    newest_phrases: Callable[..., torch.Tensor]
    harvest: Callable[..., tuple[Phrases, Phrases]]


REFERENCE = Operations(
    "torch", fill_tree, update_from_logits, walk, insert_phrases, newest_phrases, harvest
)
