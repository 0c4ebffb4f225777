"""Tree attention in C++ against vLLM's own op, bit for bit: a row is the decode row of its path."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cache_layouts import HAS_AMX, STALE, halves, write
from vllm import _custom_ops as ops

from vllm_recycle.core.tree import Trees
from vllm_recycle.kernels.cpu import cache_calls
from vllm_recycle.kernels.cpu.cache_calls import TreeQueries

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx2_supported(), reason="the bits are those of x86"
)


@dataclass(frozen=True)
class Shape:
    isa: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_size: int
    block_size: int = 64

    def cache(self, num_blocks: int) -> torch.Tensor:
        shape = (num_blocks, self.kv_heads, self.block_size, 2 * self.head_size)
        return torch.full(shape, STALE, dtype=self.dtype)

    def random(self, rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, self.head_size).to(self.dtype)


SHAPES = [
    Shape("vec", torch.float32, 9, 3, 64, 32),
    Shape("vec", torch.float32, 4, 4, 128),
    Shape("vec", torch.float32, 12, 1, 32),
    Shape("vec16", torch.float32, 4, 2, 80, 48),
    Shape("vec", torch.bfloat16, 9, 3, 64),
    Shape("vec16", torch.bfloat16, 10, 2, 80, 48),
]


@dataclass(frozen=True)
class Text:
    """A text's keys and values, each [tokens, kv_heads, head_size], and a query a tree row."""

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    context: int
    parents: list[int]

    @classmethod
    def random(cls, shape: Shape, context: int, parents: list[int]) -> Text:
        tokens = context + len(parents)
        sides = (shape.random(tokens, shape.kv_heads) for _ in range(2))
        return cls(*sides, shape.random(len(parents), shape.heads), context, parents)

    def path(self, row: int) -> torch.Tensor:
        """The tokens that a row sees, in order."""
        rows = [row]
        while rows[-1]:
            rows.append(self.parents[rows[-1]])
        seen = self.context + torch.tensor(rows[::-1])
        return torch.cat((torch.arange(self.context), seen))


def random_parents(rows: int) -> list[int]:
    return [0, *(int(torch.randint(max(0, row - 4), row, ())) for row in range(1, rows))]


def fill(shape: Shape, texts: list[tuple[torch.Tensor, torch.Tensor]]):
    """A cache of these keys and values, and its block table."""
    size = shape.block_size
    each = 1 + max(len(keys) for keys, _ in texts) // size
    kv_cache = shape.cache(len(texts) * each)
    table = torch.randperm(len(texts) * each).view(len(texts), each)
    tokens = [torch.arange(len(keys)) for keys, _ in texts]
    slots = [row[t // size] * size + t % size for row, t in zip(table, tokens, strict=True)]
    keys, values = (torch.cat(side) for side in zip(*texts, strict=True))
    write(kv_cache, keys, values, torch.cat(slots), shape.isa)
    return kv_cache, table.int()


def decode_rows(shape: Shape, texts: list[Text], window: int | None, sinks) -> torch.Tensor:
    """vLLM's attention of each row as the last token of its path's plain text, in one batch."""
    paths = [(text, text.path(row)) for text in texts for row in range(len(text.parents))]
    kv_cache, table = fill(shape, [(text.keys[path], text.values[path]) for text, path in paths])
    query = torch.cat([text.queries for text in texts])
    starts = torch.arange(len(query) + 1, dtype=torch.int32)
    lengths = torch.tensor([len(path) for _, path in paths], dtype=torch.int32)
    shared = {"seq_lens": lengths, "query_start_loc": starts, "causal": True}
    sliding = -1 if window is None else window
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(query),
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_size,
        dtype=shape.dtype,
        sliding_window_size=sliding,
        isa=shape.isa,
        enable_kv_split=False,
        **shared,
    )
    key_cache, value_cache = halves(kv_cache)
    output = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        scale=shape.head_size**-0.5,
        alibi_slopes=None,
        sliding_window=sliding,
        block_table=table,
        softcap=0.0,
        scheduler_metadata=metadata,
        s_aux=sinks,
        **shared,
    )
    return output


def tree_rows(shape: Shape, texts: list[Text], window: int | None, sinks, *, own: bool):
    """Our attention of all trees in one call."""
    kv_cache, table = fill(
        shape,
        [
            (t.keys[: t.context], t.values[: t.context]) if own else (t.keys, t.values)
            for t in texts
        ],
    )
    query = torch.cat([text.queries for text in texts])
    num_rows = torch.tensor([len(text.parents) for text in texts])
    most = int(num_rows.max())
    parents = [[*text.parents, *[0] * (most - len(text.parents))] for text in texts]
    trees = TreeQueries(
        trees=Trees.from_parents(torch.tensor(parents)),
        first=num_rows.cumsum(0) - num_rows,
        num_rows=num_rows,
        num_context=torch.tensor([text.context for text in texts]),
        block_table=table,
        block_size=shape.block_size,
    )
    sides = (
        torch.cat([getattr(t, side)[t.context :] for t in texts]) for side in ("keys", "values")
    )
    output = torch.empty_like(query)
    cache_calls.tree_attention(
        query,
        kv_cache,
        output,
        trees=trees,
        scale=shape.head_size**-0.5,
        isa=shape.isa,
        own=tuple(sides) if own else None,
        window=window,
        sinks=sinks,
    )
    return output


def compare(shape: Shape, texts: list[Text], window: int | None, sinks, *, own: bool) -> None:
    ours = tree_rows(shape, texts, window, sinks, own=own)
    theirs = decode_rows(shape, texts, window, sinks)
    raw = torch.int16 if shape.dtype == torch.bfloat16 else torch.int32
    differ = (ours.view(raw) != theirs.view(raw)).float().mean()
    assert torch.equal(ours.view(raw), theirs.view(raw)), f"{differ:.2%} of the bits' values differ"


@pytest.mark.parametrize("own", [False, True], ids=["cached", "own"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_bits_of_the_decode_row_of_its_path(shape, window, sinks, own):
    torch.manual_seed(0)
    texts = [
        Text.random(shape, context, random_parents(rows))
        for context, rows in ((0, 5), (13, 1), (37, 24), (64, 40), (411, 16))
    ]
    # From little of the weight to nearly all, on both sides of what vLLM rescales at.
    sink = torch.linspace(-30, 30, shape.heads).to(shape.dtype) if sinks else None
    compare(shape, texts, window, sink, own=own)


def test_a_head_may_have_more_scores_than_are_kept_for_several():
    shape = Shape("vec", torch.float32, 12, 1, 32)
    torch.manual_seed(1)
    texts = [Text.random(shape, context, random_parents(5)) for context in (3000, 40, 3000)]
    compare(shape, texts, None, None, own=False)


@pytest.mark.parametrize("own", [False, True], ids=["cached", "own"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_one_thread(shape, own):
    torch.manual_seed(3)
    texts = [
        Text.random(shape, context, random_parents(rows))
        for context, rows in ((0, 5), (13, 1), (700, 40), (411, 16))
    ]
    sinks = torch.linspace(-30, 30, shape.heads).to(shape.dtype)
    expected, before = None, torch.get_num_threads()
    try:
        for threads in [1, *[2, 4, 7] * 5]:
            torch.set_num_threads(threads)
            got = tree_rows(shape, texts, 300, sinks, own=own)
            expected = got if expected is None else expected
            assert torch.equal(got, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sharpness", [0.01, 4, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_may_be_near_or_far_apart(dtype, sharpness):
    shape = Shape("vec", dtype, 9, 3, 64)
    torch.manual_seed(1)
    text = Text.random(shape, 400, random_parents(24))
    text.queries.mul_(sharpness)
    compare(shape, [text], None, None, own=False)


@pytest.mark.skipif(not HAS_AMX, reason="this CPU has no AMX")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_chains_in_the_amx_layout_have_the_bits_of_decode_rows(window, sinks):
    shape = Shape("amx", torch.bfloat16, 9, 3, 64)
    torch.manual_seed(2)
    texts = [Text.random(shape, context, [0, *range(7)]) for context in (0, 13, 64, 411)]
    sink = torch.linspace(-30, 30, shape.heads).bfloat16() if sinks else None
    compare(shape, texts, window, sink, own=False)
