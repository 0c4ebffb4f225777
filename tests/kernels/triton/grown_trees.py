"""Trees of several requests as data, for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_recycle.core import BatchTrees, TreeTemplate
from vllm_recycle.kernels.triton.topology import WORD_BITS, DeviceTrees


def batch_of(templates: Sequence[TreeTemplate], num_nodes: int) -> BatchTrees:
    """A tree for each request, with children of the root behind its last node."""
    parents = torch.zeros(len(templates), num_nodes + 1, dtype=torch.int64)
    for b, template in enumerate(templates):
        parents[b, : template.num_nodes + 1] = template.parents
    return BatchTrees.from_parents(parents)


def bits_of(trees: BatchTrees) -> torch.Tensor:
    """int32 [batch, rows, words], see `topology.ancestor_bits`."""
    batch, rows, _ = trees.ancestor_mask.shape
    mask = torch.nn.functional.pad(trees.ancestor_mask.to(torch.int32), (0, -rows % WORD_BITS))
    words = mask.view(batch, rows, -1, WORD_BITS) << torch.arange(WORD_BITS, dtype=torch.int32)
    return words.sum(3, dtype=torch.int32)


def on_device(
    trees: BatchTrees,
    idx_mapping: Sequence[int],
    max_num_reqs: int,
    device: torch.device | str,
    *,
    depth: int | None = None,
) -> DeviceTrees:
    """The trees of a batch where requests have theirs; those of other requests have no node."""
    depth = trees.depth if depth is None else depth
    placed = DeviceTrees.make(max_num_reqs, trees.num_nodes, depth=depth, device=device)
    index = torch.tensor(idx_mapping, device=device)
    placed.parents[index] = trees.parents.to(device, torch.int32)
    placed.depths[index] = trees.depths.to(device, torch.int32)
    placed.ancestor_bits[index] = bits_of(trees).to(device)
    return placed
