"""How the rows of a step are shared between drafts: evenly, within the budget, and all of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_recycle.integration.draft_limits import even_limit


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 80), max_size=12), budget=st.integers(0, 400))
def test_the_limit_is_the_largest_that_keeps_within_the_budget(lengths, budget):
    limit = even_limit(lengths, budget)
    within = [
        n
        for n in range(max(lengths, default=0) + 1)
        if sum(min(length, n) for length in lengths) <= budget
    ]
    assert limit == max(within)


@pytest.mark.parametrize(
    ("lengths", "budget", "limit"),
    [
        ([], 10, 0),
        ([80, 80], 160, 80),  # all fit
        ([80, 80], 159, 79),
        ([4, 80, 80], 100, 48),  # what a short draft leaves goes to the others
        ([80, 80, 80], 2, 0),  # less than a token each
        ([0, 0], 0, 0),
    ],
)
def test_drafts_are_cut_to_one_length(lengths, budget, limit):
    assert even_limit(lengths, budget) == limit
