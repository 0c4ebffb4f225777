"""Growing the trees of a batch, best first, to their worth.

A node is worth the chance that it is accepted: the product of the acceptance along its path. From
the roots, the node with the most is added again and again, over all requests together. So the
nodes of a request are parents first, and any prefix of them is a tree. What is kept are the nodes
up to the point where the step gives the most tokens for its time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch

from vllm_recycle.core.adjacency import MatrixLayout, find_entry
from vllm_recycle.core.tree import Trees
from vllm_recycle.core.verification import NO_TOKEN


@dataclass(frozen=True, slots=True)
class Growth:
    """What was drafted for a batch.

    Attributes:
        num_nodes: int64 [batch], nodes of each tree.
        token_ids: int64 [batch, nodes], of each node, padded with -1.
        trees: how they hang together.

    """

    num_nodes: torch.Tensor
    token_ids: torch.Tensor
    trees: Trees


def grow(
    table: torch.Tensor,
    rates: torch.Tensor,
    *,
    layout: MatrixLayout,
    salts: torch.Tensor,
    tails: torch.Tensor,
    max_depths: torch.Tensor,
    times: torch.Tensor,
    slopes: torch.Tensor,
    num_other_rows: int,
    max_nodes: int,
) -> Growth:
    """Draft below the last token of each text.

    Args:
        table: int32 [addresses, 2 + k].
        rates: float64 [contexts, 2, k, 4], see `AcceptanceTable.rates`.
        layout: of the table.
        salts: int64 [batch].
        tails: int64 [batch, reach], each text, the newest token first.
        max_depths: int64 [batch], the most levels of each tree below its root.
        times: float64 [rows + 1], the time of a step by its rows, never falling.
        slopes: float64 [rows + 1], what a row more costs at least.
        num_other_rows: rows of the step beside those of these trees, each of which gives a token.
        max_nodes: the most nodes of a tree.

    """
    batch = len(tails)
    token_ids: list[list[int]] = [[] for _ in range(batch)]
    parents, depths = [[0] for _ in range(batch)], [[0] for _ in range(batch)]
    contexts = [[tail] for tail in tails.tolist()]
    most_levels, salt = max_depths.tolist(), salts.tolist()
    heap: list[tuple[float, int, int, int, int]] = []
    pushed = 0

    def expand(b: int, row: int, value: float) -> None:
        nonlocal pushed
        if depths[b][row] == most_levels[b] or len(token_ids[b]) == max_nodes:
            return
        found = find_entry(table, contexts[b][row], salt[b], layout)
        if found is None:
            return
        address, index, own = found
        head, *successors, _ = table[address].tolist()
        for rank, token in enumerate(successors):
            if token >= 0:
                worth = value * float(rates[index, own, rank, head & 3])
                heapq.heappush(heap, (-worth, pushed, b, row, token))
                pushed += 1

    rows = num_other_rows + batch
    last = len(times) - 1
    total = float(rows)
    for b in range(batch):
        expand(b, 0, 1.0)
    best = total / float(times[min(rows, last)])
    grown: list[int] = []  # whose each node is
    num_kept = 0
    while heap and rows < last:
        worth, _, b, parent, token = heapq.heappop(heap)
        if len(token_ids[b]) == max_nodes:
            continue
        if -worth <= best * float(slopes[rows]):
            break  # no number of nodes like this one, or worse, makes the step better
        total, rows = total - worth, rows + 1
        token_ids[b].append(token)
        parents[b].append(parent)
        depths[b].append(depths[b][parent] + 1)
        contexts[b].append([token, *contexts[b][parent]][: layout.reach])
        grown.append(b)
        if total / float(times[rows]) > best:
            best, num_kept = total / float(times[rows]), len(grown)
        expand(b, len(token_ids[b]), -worth)
    num_nodes = [grown[:num_kept].count(b) for b in range(batch)]
    padded = torch.full((batch, max_nodes), NO_TOKEN)
    hangs_below = torch.zeros(batch, max_nodes + 1, dtype=torch.int64)
    for b, count in enumerate(num_nodes):
        padded[b, :count] = torch.tensor(token_ids[b][:count], dtype=torch.int64)
        hangs_below[b, : count + 1] = torch.tensor(parents[b][: count + 1])
    trees = Trees.from_parents(hangs_below)
    return Growth(torch.tensor(num_nodes, dtype=torch.int64), padded, trees)
