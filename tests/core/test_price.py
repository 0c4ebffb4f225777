"""The one price: which nodes are chosen, and what a step takes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import BRIEF, THOROUGH, step_times

from vllm_recycle.core import price
from vllm_recycle.core.price import StepTimes


def choose(*args) -> torch.Tensor:
    """How many nodes of each request."""
    return price.choose(*args)[0]


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
@given(worths=worths_of(5), times=step_times())
def test_no_other_prefixes_give_more_tokens_for_the_time_where_worths_never_rise(worths, times):
    worths, values = [sorted(row, reverse=True) for row in worths], times.times[0]
    chosen, rate = price.choose(torch.tensor(worths), values)
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
@given(worths=worths_of(7), times=step_times())
def test_no_other_blocks_give_more_tokens_for_the_time_where_worths_rise(worths, times):
    values, ends = times.times[0], [block_ends(row) for row in worths]
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


@pytest.mark.parametrize(("cost", "expected"), [(0.0, 4), (0.2, 2), (0.6, 0)])
def test_the_dearer_a_row_the_fewer_nodes(cost, expected):
    worths = torch.tensor([[0.5, 0.4, 0.1, 0.05]])
    times = StepTimes.linear(cost, 20).at(1, 0)
    assert choose(worths, times).tolist() == [expected]


def test_a_hole_is_paid_for_where_a_better_node_lies_behind_it():
    times = StepTimes.linear(0.2, 20).at(1, 0)
    worths = torch.tensor([[0.5, 0.0, 0.9, 0.0]])
    assert choose(worths, times).tolist() == [3]
    worths[0, 2] = 0.3
    assert choose(worths, times).tolist() == [1]
    # Nobody computes rows behind the last node that is filled.
    free = StepTimes.linear(0.0, 20).at(1, 0)
    assert choose(worths, free).tolist() == [3]


@pytest.mark.parametrize(("max_rows", "expected"), [(5, [1, 2]), (3, [0, 1]), (1, [0, 0])])
def test_the_rows_of_a_step_are_shared_out_by_worth(max_rows, expected):
    worths = torch.tensor([[0.5, 0.25], [0.75, 0.5]])
    times = StepTimes.linear(0.0, max_rows).at(1, 0)
    assert choose(worths, times).tolist() == expected


def test_nodes_below_a_dear_one_are_seen_where_rows_are_free_again():
    # The second row costs half a step, the ones after it nothing.
    times = torch.tensor([1, 1, 2, 2, 2, 2], dtype=torch.float64)
    worths = torch.tensor([[0.75**depth for depth in range(1, 6)]])
    assert choose(worths, times).tolist() == [4]


def test_of_equally_good_numbers_of_nodes_the_least_is_taken():
    # One row gives a token in 1, three rows 1.75 tokens in 1.75.
    times = torch.tensor([1, 1, 1.75, 1.75], dtype=torch.float64)
    assert choose(torch.tensor([[0.5, 0.25]]), times).tolist() == [0]


# Times.


@THOROUGH
@given(times=step_times())
def test_a_slope_is_the_least_to_any_larger_number_of_rows(times):
    values = times.times[0].tolist()
    for rows, slope in enumerate(price.least_slopes(values)):
        further = range(rows + 1, len(values))
        least = min(((values[b] - values[rows]) / (b - rows) for b in further), default=torch.inf)
        assert slope == least


@BRIEF
@given(values=st.lists(st.floats(0.1, 10), min_size=1, max_size=20))
def test_times_never_fall(values):
    times = StepTimes({(1, 0): values}).times[0].tolist()
    assert times == [max(values[: row + 1]) for row in range(len(values))]


def test_linear_times_are_in_units_of_one_row():
    times = StepTimes.linear(0.25, 4)
    assert times.max_rows == 4
    assert times.times.tolist() == [[1, 1, 1.25, 1.5, 1.75]]


def test_between_and_beyond_what_was_measured_times_lie_on_lines():
    points = {(2, 0): {2: 5.0, 4: 5.0}, (1, 0): {1: 2.0, 3: 4.0, 5: 3.0, 9: 6.0}}
    times = StepTimes.measured(points, 11)
    assert times.loads == ((1, 0), (2, 0))
    # What five rows took is less than what three did: noise, so both took what is between them.
    expected = [1, 1, 1.375, 1.75, 1.75, 1.75, 2.0625, 2.375, 2.6875, 3, 3.3125, 3.625]
    assert times.times.tolist() == [expected, [1] * 12]
    assert StepTimes.measured(points, 2).times[0].tolist() == expected[:3]


def test_two_noisy_times_do_not_make_what_is_beyond_free():
    times = StepTimes.measured({(1, 0): {1: 1.0, 48: 3.0, 81: 2.9}}, 200)
    assert (times.times[0, 81:].diff() > 0.01).all()
    assert float(times.times[0, 200]) > 4


def test_the_nearest_context_is_taken():
    times = StepTimes({(1, 1000): [3, 3], (1, 0): [1, 2], (1, 100): [2, 4]})
    first = [float(times.at(1, context)[0]) for context in (0, 40, 50.5, 400, 600, 10**6)]
    assert first == [1, 1, 2, 2, 3, 3]


def test_the_nearest_number_of_requests_comes_before_the_nearest_context():
    times = StepTimes({(1, 0): [1] * 20, (4, 1000): [2] * 20, (4, 50): [3] * 20, (16, 0): [4] * 20})
    loads = [(1, 9), (2, 9), (3, 9), (3, 900), (7, 0), (9, 0), (500, 999)]
    assert [float(times.at(*load)[-1]) for load in loads] == [1, 1, 3, 2, 3, 4, 4]


def test_a_row_costs_what_it_does_behind_as_many_rows_of_drafts():
    # Of four requests: a plain step takes 1, and each row of a draft a half.
    times = StepTimes({(4, 0): [1, 1, 1, 1, 1, 1.5, 2, 2.5, 3]})
    for num_reqs in (2, 3, 4, 5, 7):
        assert times.at(num_reqs, 0)[num_reqs:].tolist() == [1, 1.5, 2, 2.5, 3]


def test_a_given_cost_is_of_any_number_of_requests():
    times = StepTimes.linear(0.25, 6).at(3, 500)
    assert times.tolist() == [1, 1, 1.25, 1.5, 1.75, 2, 2.25]


def test_times_of_each_are_those_of_all_where_all_have_as_many_rows():
    step_times = StepTimes.linear(0.25, 12)
    assert step_times.of_each(3, 0).tolist() == [1, 1.5, 2.25, 3, 3.75]
    assert step_times.of_each(1, 0).equal(step_times.at(1, 0))
