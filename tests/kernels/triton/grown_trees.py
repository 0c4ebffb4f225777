"""Trees of several requests as data, for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_recycle.core.tree import Trees
from vllm_recycle.kernels.triton.trees import DeviceTrees, ancestor_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(
    trees: Trees, idx_mapping: Sequence[int], max_num_reqs: int, *, depth: int | None = None
) -> DeviceTrees:
    """The trees of a batch where requests have theirs; those of other requests have no node."""
    depth = trees.depth if depth is None else depth
    placed = DeviceTrees.empty(trees.num_nodes, max_num_reqs, depth=depth, device=DEVICE)
    index = torch.tensor(idx_mapping, device=DEVICE)
    placed.parents[index] = trees.parents.to(DEVICE, torch.int32)
    placed.depths[index] = trees.depths.to(DEVICE, torch.int32)
    placed.ancestor_bits[index] = ancestor_bits(trees.ancestor_mask).to(DEVICE)
    return placed
