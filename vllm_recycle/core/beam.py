"""Growing trees level by level, for devices on which many lanes look up rows at once.

The twin of `growth`, which grows node by node: of each level the best rows are expanded, and at the
end the best nodes of all levels are the tree. A node is worth no more than its parent, and comes
behind it where both are worth the same; so the best nodes are a tree, as is any prefix of them.
With enough rows expanded a level, and enough levels, it is the tree that `growth` grows where a
row costs nothing.

What a row costs is not looked at here: all trees have as many nodes as there is room for, and the
worth of each says what any prefix would give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_recycle.core.adjacency import MatrixLayout, find_entry
from vllm_recycle.core.grow import Growth
from vllm_recycle.core.tree import Trees
from vllm_recycle.core.verification import NO_TOKEN

# Rows of a level that are expanded, and levels, where nobody says otherwise.
BEAM = 16
LEVELS = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A node that may be chosen, or the root; `context` has the newest token first."""

    worth: float
    context: list[int]
    parent: _Candidate | None


def grow_by_levels(
    table: torch.Tensor,
    rates: torch.Tensor,
    *,
    layout: MatrixLayout,
    salts: torch.Tensor,
    tails: torch.Tensor,
    max_depths: torch.Tensor,
    max_nodes: int,
    beam: int,
    levels: int,
) -> tuple[Growth, torch.Tensor]:
    """Draft below the last token of each text.

    Args:
        table: int32 [addresses, 2 + k].
        rates: float32 [contexts, 2, k, 4], each from 0 to 1, see `AcceptanceTable.rates`.
        layout: of the table.
        salts: int64 [batch].
        tails: int64 [batch, reach], each text, the newest token first.
        max_depths: integer [batch], the most levels of each tree below its root.
        max_nodes: the most nodes of a tree.
        beam: the most rows of a level that are expanded, those that are worth the most.
        levels: the most levels of any tree below its root.

    Returns:
        What was drafted, and what each node is worth: float32 [batch, nodes], never rising, 0
        where there is none. A node that is worth 0 is not drafted.

    """
    batch = len(tails)
    token_ids = torch.full((batch, max_nodes), NO_TOKEN)
    parents = torch.zeros(batch, max_nodes + 1, dtype=torch.int64)
    worth = torch.zeros(batch, max_nodes)
    num_nodes = torch.zeros(batch, dtype=torch.int64)
    for b, (tail, salt, max_depth) in enumerate(
        zip(tails.tolist(), salts.tolist(), max_depths.tolist(), strict=True)
    ):
        root = _Candidate(1.0, tail, None)
        expanded, candidates = [root], []
        for _ in range(min(levels, max_depth)):
            children = [
                child
                for candidate in expanded
                for child in _children(table, rates, candidate, salt, layout)
            ]
            candidates += children
            expanded = _best(children, beam)
        chosen = _best(candidates, max_nodes)
        rows = {id(candidate): row for row, candidate in enumerate([root, *chosen])}
        for row, node in enumerate(chosen, start=1):
            token_ids[b, row - 1] = node.context[0]
            parents[b, row] = rows[id(node.parent)]
            worth[b, row - 1] = node.worth
        num_nodes[b] = len(chosen)
    return Growth(num_nodes, token_ids, Trees.from_parents(parents)), worth


def _children(
    table: torch.Tensor, rates: torch.Tensor, parent: _Candidate, salt: int, layout: MatrixLayout
) -> Iterator[_Candidate]:
    found = find_entry(table, parent.context, salt, layout)
    if found is None:
        return
    address, index, own = found
    head, *successors, _ = table[address].tolist()
    values = rates[index, own, :, head & 3] * parent.worth
    for token, worth in zip(successors, values.tolist(), strict=True):
        if token >= 0 and worth > 0:
            yield _Candidate(worth, [token, *parent.context][: layout.reach], parent)


def _best(candidates: list[_Candidate], count: int) -> list[_Candidate]:
    """Those that are worth the most, of equal ones the first."""
    return sorted(candidates, key=lambda candidate: -candidate.worth)[:count]
