"""Tree attention in Triton: against its torch twin, and what a tree is to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import BRIEF, LARGEST, batch_trees, trees
from tests.kernels.triton.attention_steps import (
    CHAIN,
    CHAINED,
    DEVICE,
    NO_BLOCK,
    PADDED,
    PAPER,
    SINKS,
    STEP,
    Request,
    Shape,
    Step,
    assert_close,
    below_chain,
)
from tests.kernels.triton.grown_trees import on_device
from vllm_recycle.core.paper.draft_shape import DraftShape
from vllm_recycle.core.tree import MAX_NODES, TreeTemplate
from vllm_recycle.kernels.triton.attention import tree_attention
from vllm_recycle.kernels.triton.attention.tiles import WAVES, Tile, choose_num_splits, choose_tile
from vllm_recycle.kernels.triton.attention.tree_attention import COMBINED_SPLITS, LEAST_SHARE

# The sizes of the paper.
LOOKAHEAD = below_chain(DraftShape(12, 20, 20, 7, 3).lookahead(), 9)
LONG_CHAIN = TreeTemplate(tuple((row, 0) for row in range(MAX_NODES)))
ONE_HEAD = Shape(group=1, kv_heads=1)
WINDOWED = (Request(26, 150), Request(0, 0), Request(3, 0), Request(9, 330))


def case(
    name: str, *made_of: Any, own: Any = (False, True), splits: Any = (1, 3), **given: Any
) -> Iterator[Any]:
    """A step with keys and values given, cached, or each; in how many splits, and what else."""
    for one in own:
        name_of_one = f"{name}, {'own' if one else 'cached'}"
        yield pytest.param(made_of, one, splits, given, id=name_of_one)


def cases() -> Iterator[Any]:
    # With a group of 7 a tile ends within row 4, which is the first of its block of tokens.
    requests = (Request(11, 156), Request(3, 0))
    for size, group in ((64, 4), (80, 1), (96, 7), (128, 8), (256, 2)):
        shape = Shape(head_size=size, group=group)
        yield from case(f"heads of {size}", PAPER, requests, shape, own=(False,))
    # Tokens of a tile from one block, from several, and from parts of blocks.
    for block, tokens in ((16, 16), (16, 64), (32, 64), (48, 32), (128, 16), (128, 64)):
        name, shape = f"blocks of {block}, tiles of {tokens}", Shape(block_size=block, group=1)
        yield from case(name, PAPER, STEP, shape, splits=(1, 2, 5), tile=Tile(32, tokens, warps=4))
    assert (COMBINED_SPLITS + 1) * LEAST_SHARE < 1300
    requests = (Request(5, 1300), Request(2, 1), Request(1, 700))
    name = "more shares than are combined at once"
    yield from case(name, PAPER, requests, own=(False,), splits=(12,))
    # Every two values of type, layout and place together.
    for dtype in (torch.float16, torch.bfloat16):
        for tokens_first in (True, False):
            shape = Shape(dtype=dtype, tokens_first=tokens_first, head_size=128)
            own = ((dtype == torch.float16) != tokens_first,)
            name = f"{dtype}, tokens first {tokens_first}"
            yield from case(name, PAPER, STEP, shape, own=own, splits=(1, 2))
    contexts = (0, 1, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 127, 128, 129)
    requests = tuple(Request(36, context) for context in contexts)
    for tokens in (16, 32, 64):
        name, tile = f"trees that begin anywhere in {tokens} tokens", Tile(64, tokens, warps=4)
        yield from case(name, PAPER, requests, ONE_HEAD, splits=(2,), tile=tile)
    requests = (Request(MAX_NODES + 1, 83),)
    for tile in (Tile(128, 64, warps=8), Tile(64, 32, warps=4)):
        name = f"the largest tree in tiles of {tile.queries}"
        yield from case(name, LARGEST, requests, ONE_HEAD, own=(False,), splits=(2,), tile=tile)
    # The first tree's queries fill several tiles, and its columns several of a tile's tokens.
    requests = (Request(225, 85, padding=5), Request(40, 0), Request(0, 0, 2), Request(1, 32, 9))
    shape = Shape(group=1, kv_heads=1, head_size=80)
    for tile in (Tile(64, 32, warps=4), None):
        name = f"a draft forward, {'small' if tile else 'chosen'} tiles"
        yield from case(name, LOOKAHEAD, requests, shape, own=(True,), tile=tile)
    yield from case("below padding", CHAINED, PADDED)
    yield from case("below padding, sinks", CHAINED, PADDED, own=(True,), sinks=SINKS)
    # Less than a path of the tree, parts of tiles, and more than one share.
    for window in (1, 3, 40, 140):
        yield from case(f"window {window}", PAPER, WINDOWED, Shape(kv_heads=1), window=window)
        name = f"below padding, window {window}"
        yield from case(name, CHAINED, PADDED, ONE_HEAD, own=(True,), window=window)
    window = LEAST_SHARE + 20
    assert window < MAX_NODES
    given = {"splits": (4,), "tile": Tile(64, 32, warps=4), "window": window, "own": (False,)}
    requests = (Request(MAX_NODES + 1, 300),)
    yield from case("windows behind the first share", LONG_CHAIN, requests, ONE_HEAD, **given)
    for window in (None, 40):
        yield from case(f"sinks, window {window}", PAPER, WINDOWED, window=window, sinks=SINKS)
    chosen = {"own": (False,), "splits": (None,), "tile": None}
    yield from case("a chosen tile", PAPER, STEP, Shape(dtype=torch.bfloat16), **chosen)
    yield from case("a chosen tile, a window", PAPER, WINDOWED, window=140, **chosen)
    for dtype in (torch.float16, torch.bfloat16):
        shape, sinks = Shape(dtype=dtype), SINKS.to(dtype)
        name = f"a chosen tile, sinks of {dtype}"
        yield from case(name, PAPER, WINDOWED, shape, sinks=sinks, **chosen)


@pytest.mark.parametrize(("made_of", "own", "splits", "given"), cases())
def test_attention_equals_the_reference(made_of, own, splits, given):
    """At the rows of the trees; all others are left alone."""
    step = Step.make(*made_of, own=own)
    expected = step.attend_in_torch(**given)
    for num_splits in splits:
        assert_close(step.attend(num_splits=num_splits, **given), expected)


@pytest.mark.parametrize(
    ("num_splits", "idx_type", "window", "max_rows"),
    [
        (1, torch.int32, None, 41),
        (3, torch.int64, None, 81),
        (1, torch.int64, 20, 81),
        (3, torch.int32, 20, 41),
    ],
)
def test_each_request_sees_the_ancestors_of_its_own_tree(num_splits, idx_type, window, max_rows):
    """Or of its root, in a launch that is made for more requests, and for more rows of one."""
    star = TreeTemplate(tuple((0, rank) for rank in range(40)))
    placed = on_device(batch_trees([CHAIN, PAPER, star]), [3, 0, 2], 5)
    requests = (Request(26, 150), Request(0, 0), Request(36, 37), Request(41, 9), Request(1, 300))
    step = Step.make(PAPER, (*requests, *[Request(1, 0)] * 2, *[Request(0, 0)] * 3))
    idx_mapping = torch.tensor([2, 4, 0, 3, 2, 3, *[0] * 4], device=DEVICE).to(idx_type)
    tables = {"ancestor_bits": placed.ancestor_bits, "depths": placed.depths}
    rows = replace(step.rows, **tables, max_rows=max_rows, idx_mapping=idx_mapping)
    step = replace(step, rows=rows)
    output = step.attend(num_splits=num_splits, window=window)
    assert_close(output, step.attend_in_torch(window=window))


@BRIEF
@given(tree=trees(), data=st.data())
def test_any_trees_equal_the_reference(tree, data):
    rows = st.integers(0, tree.num_nodes + 1)
    chain = data.draw(st.integers(0, 40))
    size = st.tuples(rows, st.integers(0, 300), st.integers(0, chain))
    sizes = data.draw(st.lists(size, min_size=1, max_size=3))
    requests = tuple(
        Request(count, context if count else 0, padding) for count, context, padding in sizes
    )
    if not any(request.rows for request in requests):
        requests = (*requests, Request(1, 0))
    shape = Shape(head_size=16, group=2, kv_heads=1)
    step = Step.make(below_chain(tree, chain), requests, shape, own=data.draw(st.booleans()))
    tile = Tile(queries=32, tokens=data.draw(st.sampled_from([16, 32, 64])), warps=4)
    num_splits = data.draw(st.integers(1, 4))
    window = data.draw(st.none() | st.integers(1, 300))
    output = step.attend(num_splits=num_splits, tile=tile, window=window)
    assert_close(output, step.attend_in_torch(window=window))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("kept_in", ["cache", "own keys", "own values"])
def test_a_node_is_seen_by_itself_and_its_descendants_alone(num_splits, kept_in):
    request, shape, own = Request(26, 150), Shape(group=1, kv_heads=1), kept_in != "cache"
    step = Step.make(PAPER, (request,), shape, own=own)
    tile = Tile(queries=32, tokens=32, warps=4)
    before = step.attend(num_splits=num_splits, tile=tile)
    for row in (0, 1, 2, 11, 25):
        other = Step.make(PAPER, (request,), shape, own=own)
        if own:
            other.own[kept_in == "own values"][row] = 3.0
        else:
            other.kv_cache[step.slot_of(0, request.context + row)] = 3.0
        after = other.attend(num_splits=num_splits, tile=tile)
        changed = (before != after).flatten(1).any(dim=1)[: request.rows]
        assert changed.tolist() == PAPER.ancestor_mask[: request.rows, row].tolist()


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


def test_contexts_are_split_for_the_requests_that_may_be_there(monkeypatch):
    choose = mock.Mock(return_value=1)
    monkeypatch.setattr(tree_attention, "choose_num_splits", choose)
    shape = Shape(kv_heads=1)
    tree, none = Request(26, 9), Request(0, 0)
    for requests in ((tree,), (tree, tree, tree), (tree, *[none] * 5)):
        Step.make(PAPER, requests, shape).attend()
    (one, empty), three, one_of_six = (call.args[:2] for call in choose.call_args_list)
    assert (empty, three) == (0, (3 * one, 0))
    # There are rows for a part of another tree.
    assert one_of_six == (2 * one, 4 * one)


# Programs of a launch that splits nothing, on a device that runs 132: one Llama-3-8B request of 81
# rows, eight of them, one on a rank of eight, and more than the device can run. Then with 64 rows,
# and room for 3 requests of 160, and for one of 64: most find nothing. Else 5 and 8 splits.
@pytest.mark.parametrize(
    ("programs", "empty", "splits"),
    [(24, 0, 5), (192, 0, 2), (3, 0, 40), (133, 0, 2), (5000, 0, 1), (48, 2512, 2), (16, 1008, 3)],
)
def test_contexts_are_split_to_fill_the_device(programs, empty, splits):
    assert choose_num_splits(programs, empty, 132) == splits
    assert splits == 1 or splits * programs <= WAVES * 132


def test_tiles_are_powers_of_two_that_hold_a_small_tree():
    every = ((8, 9, 10, 12), (64, 80, 96, 128, 256), (1, 16, 17, 104, 324, 2056), (2, 4))
    for capability, head_size, num_queries, itemsize in product(*every):
        tile = choose_tile(num_queries, head_size, itemsize=itemsize, capability=capability)
        assert {tile.queries, tile.tokens} <= {16, 32, 64, 128}
        assert tile.queries < max(32, 2 * num_queries)
