"""Which blocks of the prefix cache a draft model's own cache has, and how it takes in prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_recycle.integration.cuda.ouroboros.cache import DraftCache
from vllm_recycle.integration.cuda.ouroboros.drafter import groups_of

BLOCK_SIZE = 4


@pytest.fixture
def cache() -> DraftCache:
    return DraftCache(3, num_blocks=16, block_size=BLOCK_SIZE, device=torch.device("cpu"))


def step(cache: DraftCache, *new: tuple[int, list[int], int], given: dict | None = None) -> None:
    """Requests begin, of each: its state, its blocks and the tokens that were found; others grow.

    Blocks of the second of two KV cache groups.
    """
    given = given or {}
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=str(state), block_ids=([], blocks), num_computed_tokens=found)
            for state, blocks, found in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[str(state) for state in given],
            new_block_ids=[blocks and ([], blocks) for blocks in given.values()],
        ),
    )
    cache.follow(output, {str(state): state for state in range(3)}, 1)


def mark(cache: DraftCache, state: int, num_computed: int) -> None:
    cache.mark(np.array([state]), np.array([num_computed]))


def begins_with(cache: DraftCache, state: int) -> tuple[int, int]:
    """Tokens that the cache has, and those that it lacks."""
    return int(cache.num_cached[state]), int(cache.missing[state])


def test_what_was_taken_in_is_found_again(cache):
    step(cache, (0, [1, 2, 3], 0))
    assert begins_with(cache, 0) == (0, 0)
    mark(cache, 0, 11)  # the third block is not full
    step(cache, (1, [1, 2, 5], 8))
    assert begins_with(cache, 1) == (8, 0)
    step(cache, (2, [1, 2, 3, 6], 12))
    assert begins_with(cache, 2) == (8, 4)


def test_what_was_not_taken_in_is_not_found(cache):
    step(cache, (0, [1, 2, 3], 0))
    cache.missing[0] = 9  # of 11 tokens
    mark(cache, 0, 11)
    step(cache, (1, [1, 2, 5], 8))
    assert begins_with(cache, 1) == (0, 8)


def test_behind_a_block_that_is_missing_nothing_counts(cache):
    step(cache, (0, [1, 2, 3], 0), (1, [4, 5, 6], 0))
    mark(cache, 0, 12)
    # The same text, but of one block that came into the cache twice.
    step(cache, (2, [1, 5, 3, 7], 12))
    assert begins_with(cache, 2) == (4, 8)
    # Which it then takes in.
    cache.missing[2] = 0
    mark(cache, 2, 12)
    step(cache, (1, [1, 5, 3, 8], 12))
    assert begins_with(cache, 1) == (12, 0)


def test_blocks_that_are_given_out_anew_have_nothing(cache):
    step(cache, (0, [1, 2], 0))
    mark(cache, 0, 8)
    step(cache, (1, [1], 0))  # another text in the same block
    step(cache, given={1: [2], 0: None})
    assert not cache.is_marked.any()
    # What is found while another request computes it in the same step.
    mark(cache, 1, 8)
    step(cache, (0, [3, 1], 0), (2, [3, 1, 4], 8))
    assert begins_with(cache, 2) == (0, 8)


def test_blocks_that_come_later_are_marked_too(cache):
    step(cache, (0, [1], 0))
    step(cache, given={0: [2]})
    mark(cache, 0, 7)
    assert np.flatnonzero(cache.is_marked).tolist() == [1]
    mark(cache, 0, 8)
    assert np.flatnonzero(cache.is_marked).tolist() == [1, 2]


def test_no_more_is_missing_than_the_text_has(cache):
    step(cache, (0, [1, 2, 3], 0))
    states = np.array([0])
    computed = np.array([10])
    cache.see(states, computed, computed)
    cache.take(states, computed, computed)
    for _ in range(100):
        # Of each step it is known later that all of its drafts but one were rejected.
        computed += 2
        cache.see(states, np.array([17]), computed + 15)
    assert cache.missing[0] == 200 + 15
    # More than there is was taken in.
    cache.take(states, np.array([215]), computed)
    cache.see(states, np.array([17]), computed + 17)
    assert cache.missing[0] == 17


def test_as_much_is_counted_as_was_taken_in(cache):
    cache.num_cached[:] = torch.tensor([10, 0, 5])
    first = cache.advance(
        torch.tensor([2, 0, 1]), torch.tensor([3, 4, 6]), torch.tensor([20, 12, 4])
    )
    # The next ones; the last ones, two of them again; more than there are.
    assert first.tolist() == [5, 8, 0]
    assert cache.num_cached.tolist() == [12, 4, 8]


# So that many long ones need no memory at once.
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
