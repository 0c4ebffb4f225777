"""How much of each text the draft model's KV cache has on a GPU, and how it takes in prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_recycle.integration.cuda.ouroboros.cache import DraftCache
from vllm_recycle.integration.cuda.ouroboros.drafter import groups_of
from vllm_recycle.integration.draft_blocks import DraftBlocks


@pytest.fixture
def cache() -> DraftCache:
    return DraftCache(3, DraftBlocks(num_blocks=16, block_size=4), torch.device("cpu"))


def begin(cache: DraftCache, state: int, blocks: list[int], found: int) -> tuple[int, int, int]:
    """A request begins; the tokens of its text that the cache has, lacks, and has at least."""
    request = SimpleNamespace(req_id="a", block_ids=(blocks,), num_computed_tokens=found)
    running = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    output: Any = SimpleNamespace(scheduled_new_reqs=[request], scheduled_cached_reqs=running)
    cache.follow(output, {"a": state}, 0)
    return int(cache.num_cached[state]), int(cache.missing[state]), int(cache.least[state])


def test_what_was_taken_in_is_found_again_and_what_was_not_is_missing(cache):
    assert begin(cache, 0, [1, 2, 3], 0) == (0, 0, 0)
    cache.missing[0] = 6
    cache.mark(np.array([0]), np.array([11]))
    assert begin(cache, 1, [1, 2, 5], 8) == (4, 4, 4)
    cache.missing[0] = 0
    cache.mark(np.array([0]), np.array([11]))
    assert begin(cache, 2, [1, 2, 3, 6], 12) == (8, 4, 8)


def test_no_more_is_missing_than_the_text_has(cache):
    begin(cache, 0, [1, 2, 3], 0)
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
