"""Which blocks of the prefix cache a draft model has taken in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_recycle.integration.draft_blocks import DraftBlocks

BLOCK_SIZE = 4


@pytest.fixture
def blocks() -> DraftBlocks:
    return DraftBlocks(num_blocks=16, block_size=BLOCK_SIZE)


def step(
    blocks: DraftBlocks,
    *new: tuple[int, list[int], int],
    given: dict[int, list[int] | None] | None = None,
    resumed: tuple[tuple[int, list[int], int], ...] = (),
) -> list[tuple[int, int, int]]:
    """Requests begin or are resumed, of each: its state, its blocks and the tokens that were found.

    Others grow. Blocks of the second of two KV cache groups.
    """
    cached = [*((state, one, 0) for state, one in (given or {}).items()), *resumed]
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=str(state), block_ids=([], one), num_computed_tokens=found)
            for state, one, found in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[str(state) for state, *_ in cached],
            new_block_ids=[one and ([], one) for _, one, _ in cached],
            num_computed_tokens=[found for *_, found in cached],
            resumed_req_ids={str(state) for state, *_ in resumed},
        ),
    )
    return blocks.follow(output, {str(n): n for n in range(3)}, 1)


def mark(blocks: DraftBlocks, state: int, num_cached: int) -> None:
    blocks.mark(np.array([state]), np.array([num_cached]))


def test_what_was_taken_in_is_found_again(blocks):
    assert step(blocks, (0, [1, 2, 3], 0)) == [(0, 0, 0)]
    mark(blocks, 0, 11)  # the third block is not full
    assert step(blocks, (1, [1, 2, 5], 8)) == [(1, 8, 8)]
    assert step(blocks, (2, [1, 2, 3, 6], 12)) == [(2, 8, 12)]
    # A text that goes on from within a block has nothing of it.
    assert step(blocks, (0, [1, 2], 6)) == [(0, 4, 6)]
    assert np.flatnonzero(blocks.is_marked).tolist() == [1]


def test_behind_a_block_that_is_missing_nothing_counts(blocks):
    step(blocks, (0, [1, 2, 3], 0), (1, [4, 5, 6], 0))
    mark(blocks, 0, 12)
    # The same text, but of one block that came into the cache twice.
    assert step(blocks, (2, [1, 5, 3, 7], 12)) == [(2, 4, 12)]
    # Which it then takes in.
    mark(blocks, 2, 12)
    assert step(blocks, (1, [1, 5, 3, 8], 12)) == [(1, 12, 12)]


def test_blocks_that_are_given_out_anew_have_nothing(blocks):
    step(blocks, (0, [1, 2], 0))
    mark(blocks, 0, 8)
    step(blocks, (1, [1], 0))  # another text in the same block
    step(blocks, given={1: [2], 0: None})
    assert not blocks.is_marked.any()
    # What is found while another request computes it in the same step.
    mark(blocks, 1, 8)
    assert step(blocks, (0, [3, 1], 0), (2, [3, 1, 4], 8)) == [(0, 0, 0), (2, 0, 8)]


def test_a_request_that_is_resumed_begins_anew(blocks):
    step(blocks, (0, [1, 2, 3], 0))
    mark(blocks, 0, 12)
    # The last of its blocks came to another.
    assert step(blocks, resumed=((0, [1, 2, 5], 8),)) == [(0, 8, 8)]
    # Blocks that come later are marked too, where they are full.
    step(blocks, given={0: [6]})
    mark(blocks, 0, 15)
    assert np.flatnonzero(blocks.is_marked).tolist() == [1, 2, 3, 5]
    mark(blocks, 0, 16)
    assert np.flatnonzero(blocks.is_marked).tolist() == [1, 2, 3, 5, 6]
