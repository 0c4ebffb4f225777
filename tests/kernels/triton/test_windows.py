"""Tree attention in Triton with a sliding window: against its torch twin, and what it reads."""

from __future__ import annotations

import pytest
from attention_steps import (
    CHAINED,
    NO_BLOCK,
    PADDED,
    PAPER,
    Request,
    Shape,
    Step,
    assert_close,
)

from vllm_recycle.core.tree import MAX_NODES, TreeTemplate
from vllm_recycle.kernels.triton.attention.tiles import Tile
from vllm_recycle.kernels.triton.attention.tree_attention import LEAST_SHARE

# Less than a path of the tree, parts of tiles, and more than one share.
WINDOWS = [1, 3, 40, 140]
REQUESTS = (Request(26, 150), Request(0, 0), Request(3, 0), Request(9, 330))
LONG_CHAIN = TreeTemplate(tuple((row, 0) for row in range(MAX_NODES)))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("num_splits", "own"), [(1, True), (3, False)], ids=["own", "cached"])
def test_windows_equal_the_reference(window, num_splits, own):
    step = Step.make(PAPER, REQUESTS, Shape(kv_heads=1), own=own)
    output = step.attend(num_splits=num_splits, window=window)
    assert_close(output, step.attend_in_torch(window=window))


@pytest.mark.parametrize("window", WINDOWS)
def test_windows_below_padding_equal_the_reference(window):
    step = Step.make(CHAINED, PADDED, Shape(group=1, kv_heads=1), own=True)
    assert_close(step.attend(window=window), step.attend_in_torch(window=window))


def test_rows_whose_window_begins_behind_the_first_share_equal_the_reference():
    step = Step.make(LONG_CHAIN, (Request(MAX_NODES + 1, 300),), Shape(group=1, kv_heads=1))
    window = LEAST_SHARE + 20
    assert window < MAX_NODES
    output = step.attend(num_splits=4, tile=Tile(64, 32, warps=4), window=window)
    assert_close(output, step.attend_in_torch(window=window))


def test_what_is_chosen_for_the_shapes_equals_the_reference():
    step = Step.make(PAPER, REQUESTS, Shape(kv_heads=1))
    assert_close(step.attend(tile=None, window=140), step.attend_in_torch(window=140))


@pytest.mark.parametrize("tokens", [16, 64])
def test_what_fell_out_of_the_window_is_not_read(tokens):
    """vLLM gives its blocks away."""
    request, window, shape = Request(26, 150), 40, Shape(group=1, kv_heads=1)
    step, tile = Step.make(PAPER, (request,), shape), Tile(32, tokens, warps=4)
    expected = step.attend(window=window, tile=tile)
    first = request.context + 1 - window
    for token in range(first):
        step.kv_cache[step.slot_of(0, token)] = float("nan")
    step.rows.block_table[0, : first // shape.block_size] = NO_BLOCK
    assert step.attend(window=window, tile=tile).equal(expected)
    step.kv_cache[step.slot_of(0, first)] = float("nan")
    assert step.attend(window=window, tile=tile)[0].isnan().any(), "the root sees what is left"
