"""Prompts are taken in some at a time, so that many long ones need no memory at once."""

from __future__ import annotations

import pytest

from vllm_recycle.integration.cuda.ouroboros.drafter import groups_of


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([3, 5], [[0, 1]]),
        ([3, 4, 9, 1, 1], [[0, 1], [2], [3, 4]]),
        ([20], [[0]]),
    ],
)
def test_groups_have_at_most_so_many_tokens_or_one_prompt(lengths, expected):
    assert list(groups_of(lengths, 8)) == expected
