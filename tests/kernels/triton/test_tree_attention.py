"""Tree attention in Triton: against its torch twin, and what a tree is to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import BRIEF, LARGEST, batch_trees, trees
from tests.kernels.cpu.tree_steps import Text, softmax_rows
from tests.kernels.triton.attention_steps import (
    CHAIN,
    CHAINED,
    DEVICE,
    NO_BLOCK,
    PADDED,
    PAPER,
    SINKS,
    SMALL,
    STEP,
    Request,
    Shape,
    Step,
    assert_close,
    below_chain,
)
from tests.kernels.triton.grown_trees import on_device
from vllm_recycle.core.lookahead import lookahead_template
from vllm_recycle.core.tree import MAX_NODES, TreeTemplate
from vllm_recycle.kernels.triton.attention.tiles import WAVES, Tile, choose_num_splits, choose_tile
from vllm_recycle.kernels.triton.attention.tree_attention import COMBINED_SPLITS, LEAST_SHARE
from vllm_recycle.kernels.triton.trees import DeviceTrees

LOOKAHEAD = below_chain(lookahead_template(window=20, levels=5, guesses=20, length=6), 9)


@pytest.mark.parametrize("own", [False, True], ids=["cached", "own"])
@pytest.mark.parametrize(("tree", "requests"), [(PAPER, STEP), (CHAINED, PADDED)])
@pytest.mark.parametrize(("window", "sinks"), [(None, None), (2, None), (40, None), (None, SINKS)])
def test_the_torch_twin_is_a_softmax_over_context_and_ancestors(tree, requests, own, window, sinks):
    step = Step.make(tree, requests, own=own)
    output = step.attend_in_torch(window=window, sinks=sinks)
    texts = []
    for index, request in enumerate(requests):
        parents = tree.parents[request.padding :][: request.rows] - request.padding
        given = (step.keys[index], step.values[index], step.query[step.rows_of(index)])
        texts.append(Text(*given, request.context, parents.tolist()))
    rows = torch.cat([output[step.rows_of(index)] for index in range(len(requests))])
    assert_close(rows, softmax_rows(texts, window=window, sinks=sinks))


LONG_CHAIN = TreeTemplate(tuple((row, 0) for row in range(MAX_NODES)))
ONE_HEAD = Shape(group=1, kv_heads=1)
WINDOWED = (Request(26, 150), Request(0, 0), Request(3, 0), Request(9, 330))


@dataclass(frozen=True)
class Case:
    """A step, and what attention is told of it."""

    name: str
    tree: TreeTemplate = PAPER
    requests: tuple[Request, ...] = STEP
    shape: Shape | None = None
    own: tuple[bool, ...] = (False, True)  # whether keys and values are given, or cached
    splits: tuple[int | None, ...] = (1, 3)
    tile: Tile | None = SMALL
    window: int | None = None
    sinks: torch.Tensor | None = None


def cases() -> Iterator[Case]:
    # With a group of 7 a tile ends within row 4, which is the first of its block of tokens.
    requests = (Request(11, 156), Request(3, 0))
    for size, group in ((64, 4), (80, 1), (96, 7), (128, 8), (256, 2)):
        shape = Shape(head_size=size, group=group)
        yield Case(f"heads of {size}", requests=requests, shape=shape, own=(False,))
    # Tokens of a tile from one block, from several, and from parts of blocks.
    for block, tokens in ((16, 16), (16, 64), (32, 64), (48, 32), (128, 16), (128, 64)):
        name, shape = f"blocks of {block}, tiles of {tokens}", Shape(block_size=block, group=1)
        yield Case(name, shape=shape, splits=(1, 2, 5), tile=Tile(32, tokens, warps=4))
    assert (COMBINED_SPLITS + 1) * LEAST_SHARE < 1300
    requests = (Request(5, 1300), Request(2, 1), Request(1, 700))
    yield Case(
        "more shares than are combined at once", requests=requests, own=(False,), splits=(12,)
    )
    # Every two values of type, layout and place together.
    for dtype in (torch.float16, torch.bfloat16):
        for tokens_first in (True, False):
            shape = Shape(dtype=dtype, tokens_first=tokens_first, head_size=128)
            own = ((dtype == torch.float16) != tokens_first,)
            yield Case(f"{dtype}, tokens first {tokens_first}", shape=shape, own=own, splits=(1, 2))
    contexts = (0, 1, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 127, 128, 129)
    requests = tuple(Request(36, context) for context in contexts)
    for tokens in (16, 32, 64):
        name, tile = f"trees that begin anywhere in {tokens} tokens", Tile(64, tokens, warps=4)
        yield Case(name, PAPER, requests, ONE_HEAD, splits=(2,), tile=tile)
    requests = (Request(MAX_NODES + 1, 83),)
    for tile in (Tile(128, 64, warps=8), Tile(64, 32, warps=4)):
        name = f"the largest tree in tiles of {tile.queries}"
        yield Case(name, LARGEST, requests, ONE_HEAD, own=(False,), splits=(2,), tile=tile)
    # The first tree's queries fill several tiles, and its columns several of a tile's tokens.
    requests = (Request(225, 85, padding=5), Request(40, 0), Request(0, 0, 2), Request(1, 32, 9))
    shape = Shape(group=1, kv_heads=1, head_size=80)
    for name, tile in (("small tiles", Tile(64, 32, warps=4)), ("chosen tiles", None)):
        yield Case(f"a draft forward, {name}", LOOKAHEAD, requests, shape, own=(True,), tile=tile)
    yield Case("below padding", CHAINED, PADDED)
    yield Case("below padding, sinks", CHAINED, PADDED, own=(True,), sinks=SINKS)
    # Less than a path of the tree, parts of tiles, and more than one share.
    for window in (1, 3, 40, 140):
        yield Case(f"window {window}", PAPER, WINDOWED, Shape(kv_heads=1), window=window)
        name = f"below padding, window {window}"
        yield Case(name, CHAINED, PADDED, ONE_HEAD, own=(True,), window=window)
    window = LEAST_SHARE + 20
    assert window < MAX_NODES
    given = {"splits": (4,), "tile": Tile(64, 32, warps=4), "window": window, "own": (False,)}
    requests = (Request(MAX_NODES + 1, 300),)
    yield Case("windows behind the first share", LONG_CHAIN, requests, ONE_HEAD, **given)
    for window in (None, 40):
        yield Case(f"sinks, window {window}", PAPER, WINDOWED, window=window, sinks=SINKS)
    chosen = {"own": (False,), "splits": (None,), "tile": None}
    yield Case("a chosen tile", shape=Shape(dtype=torch.bfloat16), **chosen)
    yield Case("a chosen tile, a window", PAPER, WINDOWED, window=140, **chosen)
    for dtype in (torch.float16, torch.bfloat16):
        shape, sinks = Shape(dtype=dtype), SINKS.to(dtype)
        yield Case(
            f"a chosen tile, sinks of {dtype}", PAPER, WINDOWED, shape, sinks=sinks, **chosen
        )


@pytest.mark.parametrize(
    ("case", "own"),
    [
        pytest.param(case, own, id=f"{case.name}, {'own' if own else 'cached'}")
        for case in cases()
        for own in case.own
    ],
)
def test_attention_equals_the_reference(case, own):
    """At the rows of the trees; all others are left alone."""
    step = Step.make(case.tree, case.requests, case.shape, own=own)
    given = {"window": case.window, "sinks": case.sinks}
    expected = step.attend_in_torch(**given)
    for num_splits in case.splits:
        assert_close(step.attend(tile=case.tile, num_splits=num_splits, **given), expected)


@pytest.mark.parametrize(
    ("num_splits", "idx_type", "window"),
    [(1, torch.int32, None), (3, torch.int64, None), (1, torch.int64, 20), (3, torch.int32, 20)],
)
def test_each_request_sees_the_ancestors_of_its_own_tree(num_splits, idx_type, window):
    star = TreeTemplate(tuple((0, rank) for rank in range(40)))
    placed = on_device(batch_trees([CHAIN, PAPER.prefix(40), star]), [3, 0, 2], 5, DEVICE)
    requests = (Request(26, 150), Request(0, 0), Request(36, 37), Request(41, 9))
    step = Step.make(PAPER, requests)
    idx_mapping = torch.tensor([2, 4, 0, 3], device=DEVICE).to(idx_type)
    tables = {"ancestor_bits": placed.ancestor_bits, "depths": placed.depths}
    rows = replace(step.rows, **tables, idx_mapping=idx_mapping)
    several = replace(step, rows=rows).attend(num_splits=num_splits, window=window)
    assert_close(several, replace(step, rows=rows).attend_in_torch(window=window))
    for index, tree in ((0, star), (2, PAPER), (3, CHAIN)):
        same = DeviceTrees.of(tree, 5, DEVICE)
        alone = replace(step.rows, ancestor_bits=same.ancestor_bits, depths=same.depths)
        flat = step.rows_of(index)
        output = replace(step, rows=alone).attend(num_splits=num_splits, window=window)
        assert several[flat].equal(output[flat])


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


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("max_rows", [26, 81])
def test_rows_of_plain_requests_are_trees_of_their_roots(num_splits, max_rows):
    """In a launch made for more requests, and for more rows of one."""
    requests = (Request(26, 150), Request(1, 300), Request(9, 37), *[Request(1, 0)] * 2)
    step = Step.make(PAPER, (*requests, *[Request(0, 0)] * 3))
    trees = on_device(batch_trees([PAPER, CHAIN]), [1, 0], 2, DEVICE)
    idx_mapping = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0], device=DEVICE)
    rows = replace(
        step.rows, max_rows=max_rows, ancestor_bits=trees.ancestor_bits, idx_mapping=idx_mapping
    )
    output = replace(step, rows=rows).attend(num_splits=num_splits)
    assert_close(output, step.attend_in_torch())


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
    launched = []
    monkeypatch.setattr(
        "vllm_recycle.kernels.triton.attention.tree_attention.choose_num_splits",
        lambda programs, empty, slots: launched.append((programs, empty)) or 1,
    )
    shape = Shape(kv_heads=1)
    tree, none = Request(26, 9), Request(0, 0)
    for requests in ((tree,), (tree, tree, tree), (tree, *[none] * 5)):
        Step.make(PAPER, requests, shape).attend()
    (one, empty), three, one_of_six = launched
    assert (empty, three) == (0, (3 * one, 0))
    # There are rows for a part of another tree.
    assert one_of_six == (2 * one, 4 * one)


# Programs of a launch that splits nothing, on a device that runs 132: one Llama-3-8B request of 81
# rows, eight of them, one on a rank of eight, and more than the device can run.
@pytest.mark.parametrize(("programs", "splits"), [(24, 5), (192, 2), (3, 40), (133, 2), (5000, 1)])
def test_contexts_are_split_to_fill_the_device(programs, splits):
    assert choose_num_splits(programs, 0, 132) == splits
    assert splits == 1 or splits * programs <= WAVES * 132


# The same heads, 64 rows: room for 3 requests of 160, and for one of 64, else split into 5 and 8.
@pytest.mark.parametrize(("full", "batch", "splits"), [(3, 160, 2), (1, 64, 3)])
def test_contexts_are_split_less_where_most_programs_find_nothing(full, batch, splits):
    assert choose_num_splits(16 * full, 16 * (batch - full), 132) == splits


@pytest.mark.parametrize("capability", [8, 9, 10, 12])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("num_queries", [1, 16, 17, 104, 324, 2056])
def test_tiles_are_powers_of_two_that_hold_a_small_tree(capability, head_size, num_queries):
    for itemsize in (2, 4):
        tile = choose_tile(num_queries, head_size, itemsize=itemsize, capability=capability)
        for size in (tile.queries, tile.tokens):
            assert size >= 16
            assert size & (size - 1) == 0
        assert tile.queries < max(32, 2 * num_queries)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="captures a CUDA graph")
@pytest.mark.parametrize("own", [False, True], ids=["cached", "own"])
def test_a_captured_graph_follows_what_is_in_the_tensors(own):
    requests = (Request(26, 4000, padding=2), Request(26, 150))
    shape = Shape(dtype=torch.bfloat16, head_size=128)
    step = Step.make(CHAINED, requests, shape, own=own)
    step.attend(tile=None)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step.attend(tile=None)
    # The other way round, with fewer rows.
    requests = (Request(9, 170, padding=1), Request(22, 3900, padding=4))
    other = Step.make(CHAINED, requests, shape, own=own)
    step.query[: other.num_rows] = other.query[: other.num_rows]
    step.kv_cache[: len(other.kv_cache)] = other.kv_cache
    for mine, theirs in zip(step.own or (), other.own or (), strict=True):
        mine[: len(theirs)] = theirs
    for name in ("query_start_loc", "seq_lens", "block_table", "num_padding"):
        mine, theirs = getattr(step.rows, name), getattr(other.rows, name)
        mine[..., : theirs.shape[-1]] = theirs
    graph.replay()
    expected = other.attend_in_torch()[: other.num_rows]
    assert_close(output[: other.num_rows], expected)
