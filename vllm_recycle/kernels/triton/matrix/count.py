"""How often drafts were right, counted on the device: see `core.acceptance`.

What a step counts is added up as integers, in any order, and folded into the counts at its end. So
every rank has the same counts, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_recycle.core import acceptance
from vllm_recycle.core.acceptance import ANY_STEADINESS, AcceptanceTable
from vllm_recycle.kernels.triton.matrix.find import find_longest

_MOST_SEEN = tl.constexpr(acceptance.MOST_SEEN)
_PRIOR_WEIGHT = tl.constexpr(acceptance.PRIOR_WEIGHT)
_STEADINESSES = tl.constexpr(ANY_STEADINESS)


@dataclass(frozen=True, slots=True)
class DeviceCounts:
    """An acceptance table on the device, and what learning needs beside it.

    Attributes:
        counts: float64 [classes, contexts, 2, k, 5, 2], those of an `AcceptanceTable`, not a copy.
        rates: float32 [classes, contexts, 2, k, 4], its rates, as they are after each step.
        increments: int32 [classes, contexts, 2, k, 4, 2], of the step; zero between steps.

    """

    counts: torch.Tensor
    rates: torch.Tensor
    increments: torch.Tensor

    @classmethod
    def of(cls, table: AcceptanceTable) -> DeviceCounts:
        """The counts of a table; who changes them otherwise brings the rates up to date."""
        rates = table.rates().float()
        increments = torch.zeros(*rates.shape, 2, dtype=torch.int32, device=rates.device)
        return cls(table.counts, rates, increments)


@triton.jit
def count_visits(
    increments: tl.tensor,
    text: tl.tensor,
    tail: tl.tensor,
    path: tl.tensor,
    token_ids: tl.tensor,
    visit: tl.tensor,
    num_rows: tl.tensor,
    table: tl.tensor,
    salt: tl.tensor,
    PATH: tl.constexpr,
    PATH_LANES: tl.constexpr,
    LAYOUT: tl.constexpr,
) -> None:
    """Count at some places of one request's path: all ranks of what drafts may come from.

    Args:
        increments: int32 [contexts, 2, k, 4, 2], of the class of the request.
        text: int64 [PATH + REACH], to work in.
        tail: int32 [CONTEXT_LANES], of the request.
        path: int64 [PATH], the rows that it visited, padded with -1.
        token_ids: int64 [PATH], what the target said there.
        visit: int32 [lanes], the places.
        num_rows: of the request; where there are none nothing is counted.
        table: as it was before the step.
        salt: of the request.

    """
    # The text that ends at each visited row, the newest token first.
    place = tl.arange(0, PATH_LANES)
    emitted_token = tl.load(token_ids + place, mask=place < PATH, other=-1)
    tl.store(text + (PATH - 1) - place, emitted_token, mask=place < PATH)
    place = tl.arange(0, LAYOUT.CONTEXT_LANES)
    tl.store(text + PATH + place, tail.to(tl.int64), mask=place < LAYOUT.REACH)
    tl.debug_barrier()
    is_visited = (visit < PATH) & (visit < num_rows)
    is_visited = is_visited & (tl.load(path + visit, mask=is_visited, other=-1) >= 0)
    shared, shared_cell, own, own_cell = find_longest(
        table, text + (PATH - visit), salt, is_visited, LAYOUT
    )
    token = tl.load(token_ids + visit, mask=is_visited, other=-1)
    _count_entries(increments, table, shared, shared_cell, token, LAYOUT.K)
    _count_entries(increments, table, own, own_cell, token, LAYOUT.K)


@triton.jit
def _count_entries(
    increments: tl.tensor,
    table: tl.tensor,
    address: tl.tensor,
    cell: tl.tensor,
    token: tl.tensor,
    K: tl.constexpr,
) -> None:
    """Count all ranks of some entries, one a lane; see `find_longest`."""
    for rank in range(K):
        successor = tl.load(table + address * (2 + K) + 1 + rank, mask=address >= 0, other=-1)
        cells = increments + (cell + rank * _STEADINESSES) * 2
        has_successor = successor >= 0
        tl.atomic_add(cells, 1, mask=has_successor & (successor == token), sem="relaxed")
        tl.atomic_add(cells + 1, 1, mask=has_successor, sem="relaxed")


@triton.jit
def fold_counts(
    counts: tl.tensor,
    rates: tl.tensor,
    increments: tl.tensor,
    first_rank: tl.tensor,
    ALL_RANKS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Take in what was counted of `LANES` ranks, and leave their rates."""
    rank = first_rank + tl.arange(0, LANES)
    is_rank = rank < ALL_RANKS
    steadiness = tl.arange(0, _STEADINESSES)[None, :]
    cell = rank[:, None] * _STEADINESSES + steadiness
    mask = is_rank[:, None] & (steadiness >= 0)
    right = tl.load(increments + cell * 2, mask=mask, other=0)
    seen = tl.load(increments + cell * 2 + 1, mask=mask, other=0)
    rank_cells = counts + (rank * (_STEADINESSES + 1) + _STEADINESSES) * 2
    rank_right, rank_seen = add_to_counts(rank_cells, tl.sum(right, 1), tl.sum(seen, 1), is_rank)
    cells = counts + (rank[:, None] * (_STEADINESSES + 1) + steadiness) * 2
    cell_right, cell_seen = add_to_counts(cells, right, seen, mask)
    rate = rank_right / tl.maximum(rank_seen, 1.0)
    rate = (cell_right + _PRIOR_WEIGHT * rate[:, None]) / (cell_seen + _PRIOR_WEIGHT)
    tl.store(rates + cell, rate.to(tl.float32), mask=mask)
    tl.debug_barrier()
    tl.store(increments + cell * 2, 0, mask=mask)
    tl.store(increments + cell * 2 + 1, 0, mask=mask)


@triton.jit
def add_to_counts(
    cells: tl.tensor, right: tl.tensor, seen: tl.tensor, mask: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """What cells hold when these were added, float64."""
    right = tl.load(cells, mask=mask, other=0.0) + right.to(tl.float64)
    seen = tl.load(cells + 1, mask=mask, other=0.0) + seen.to(tl.float64)
    factor = tl.where(seen > _MOST_SEEN, 0.5, 1.0)
    right, seen = right * factor, seen * factor
    tl.debug_barrier()
    tl.store(cells, right, mask=mask)
    tl.store(cells + 1, seen, mask=mask)
    return right, seen
