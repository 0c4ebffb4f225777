"""How the rows of a step are shared between drafts: evenly, within the budget, and all of it."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_recycle.integration.draft_room import even_limit


@settings(deadline=None)
@example(lengths=[4, 80, 80], budget=100)  # what a short draft leaves goes to the others
@given(lengths=st.lists(st.integers(0, 80), max_size=12), budget=st.integers(0, 400))
def test_the_limit_is_the_largest_that_keeps_within_the_budget(lengths, budget):
    limit = even_limit(lengths, budget)
    within = [
        n
        for n in range(max(lengths, default=0) + 1)
        if sum(min(length, n) for length in lengths) <= budget
    ]
    assert limit == max(within)
