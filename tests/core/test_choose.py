"""Which nodes a step verifies: the most expected tokens for its seconds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import THOROUGH, seconds_by_rows
from vllm_recycle.core import choose as module
from vllm_recycle.core.choose import least_slopes
from vllm_recycle.core.curve import TREES, Load, MeasuredCurve


def choose(worths: torch.Tensor, seconds: torch.Tensor, **given) -> torch.Tensor:
    """How many nodes of each request."""
    return torch.tensor(module.choose(worths.tolist(), seconds.tolist(), **given)[0])


def rate_of(worths: list[list[float]], sizes: tuple[int, ...], times) -> float:
    """Tokens by time of a step with these prefixes; 0 where it has no room for them."""
    rows = len(worths) + sum(sizes)
    tokens = len(worths) + sum(sum(row[:size]) for row, size in zip(worths, sizes, strict=True))
    if rows >= len(times) and sum(sizes):
        return 0.0
    return tokens / float(times[min(rows, len(times) - 1)])


# Eighths: sums are exact.
eighths = st.integers(0, 8).map(lambda number: number / 8)


@st.composite
def worths_of(draw, most_nodes: int) -> list[list[float]]:
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(1, most_nodes))
    row = st.lists(eighths, min_size=nodes, max_size=nodes)
    return draw(st.lists(row, min_size=batch, max_size=batch))


@THOROUGH
@given(worths=worths_of(5), values=seconds_by_rows())
def test_no_other_prefixes_give_more_tokens_for_the_time_where_worths_never_rise(worths, values):
    worths = [sorted(row, reverse=True) for row in worths]
    counts, rate = module.choose(worths, values.tolist())
    chosen = torch.tensor(counts)
    every = itertools.product(range(len(worths[0]) + 1), repeat=len(worths))
    rates = {sizes: rate_of(worths, sizes, values) for sizes in every}
    assert rates[tuple(chosen.tolist())] == max(rates.values()) == pytest.approx(rate)
    fewest = min(sum(sizes) for sizes, rate in rates.items() if rate == max(rates.values()))
    assert int(chosen.sum()) == fewest


def block_ends(worths: list[float]) -> list[int]:
    """Where the steepest lines over what prefixes give have their corners, by looking at all."""
    gains, ends = np.cumsum([0.0, *worths]), [0]
    while ends[-1] < len(worths):
        start = ends[-1]
        further = range(start + 1, len(gains))
        ends.append(
            max(further, key=lambda end: ((gains[end] - gains[start]) / (end - start), -end))
        )
    return ends


@THOROUGH
@given(worths=worths_of(7), values=seconds_by_rows())
def test_no_other_blocks_give_more_tokens_for_the_time_where_worths_rise(worths, values):
    ends = [block_ends(row) for row in worths]
    blocks = [
        (-sum(row[a:b]) / (b - a), request, b - a)
        for request, row in enumerate(worths)
        for a, b in itertools.pairwise(ends[request])
    ]
    sizes, tried = [0] * len(worths), [tuple([0] * len(worths))]
    for _, request, size in sorted(blocks, key=lambda block: block[:2]):
        sizes[request] += size
        tried.append(tuple(sizes))
    rates = [rate_of(worths, sizes, values) for sizes in tried]
    chosen = choose(torch.tensor(worths), values)
    assert tuple(chosen.tolist()) == tried[rates.index(max(rates))]


def test_a_few_sizes_that_all_drafts_share_are_the_nodes_of_one():
    # Three requests, of which two draft: 2 rows of each size more.
    seconds = torch.full((20,), torch.inf, dtype=torch.float64)
    seconds[[3, 5, 9, 17]] = torch.tensor([1.0, 1.1, 1.2, 3.0]).double()
    gives = torch.tensor([[0.5, 0.5, 0.25]])
    given = {"num_reqs": 3, "widths": [2, 4, 8]}
    assert choose(gives, seconds, **given).tolist() == [2]
    seconds[9] = torch.inf  # has no graph
    assert choose(gives, seconds, **given).tolist() == [1]
    # What is behind a size that gives little is seen.
    seconds[9], seconds[5] = 1.2, 2.0
    assert choose(torch.tensor([[0.1, 0.9, 0.0]]), seconds, **given).tolist() == [2]


def test_drafts_that_are_not_trusted_are_smaller():
    worths, seconds = (
        torch.tensor([[0.5, 0.4, 0.1, 0.05]]),
        MeasuredCurve.linear(0.2, 20, [TREES]).by_rows(TREES, Load(1)),
    )
    sizes = [int(choose(worths, seconds, trust=trust)) for trust in (1.0, 0.5, 0.3)]
    assert sizes == [2, 1, 0]


@THOROUGH
@given(values=seconds_by_rows())
def test_a_slope_is_the_least_to_any_larger_number_of_rows(values):
    values = values.tolist()
    for rows, slope in enumerate(least_slopes(values)):
        further = range(rows + 1, len(values))
        least = min(((values[b] - values[rows]) / (b - rows) for b in further), default=torch.inf)
        assert slope == least
