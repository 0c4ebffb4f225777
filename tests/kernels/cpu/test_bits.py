"""Tree attention in C++ against vLLM's own op, bit for bit: a row is the decode row of its path."""

from __future__ import annotations

import pytest
import torch
from vllm import _custom_ops as ops

from tests.kernels.cpu.cache_layouts import HAS_AMX, Layout, halves
from tests.kernels.cpu.tree_steps import Step, Text, fill, sinks_of, texts_of

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx2_supported(), reason="the bits are those of x86"
)


LAYOUTS = [
    Layout("vec", torch.float32, 64, 32, 9, 3),
    Layout("vec", torch.float32, 128, 64, 4, 4),
    Layout("vec", torch.float32, 32, 64, 12, 1),
    Layout("vec16", torch.float32, 80, 48, 4, 2),
    Layout("vec", torch.bfloat16, 64, 64, 9, 3),
    Layout("vec16", torch.bfloat16, 80, 48, 10, 2),
]


def random_parents(rows: int) -> list[int]:
    return [0, *(int(torch.randint(max(0, row - 4), row, ())) for row in range(1, rows))]


def random_texts(layout: Layout, *sizes: tuple[int, int]) -> list[Text]:
    """From the context and the number of rows of each."""
    torch.manual_seed(0)
    return texts_of(layout, *((context, random_parents(rows)) for context, rows in sizes))


def decode_rows(layout: Layout, texts: list[Text], window: int | None, sinks) -> torch.Tensor:
    """vLLM's attention of each row as the last token of its path's plain text, in one batch."""
    paths = [(text, path) for text in texts for path in text.visible]
    kv_cache, table = fill(layout, [(text.keys[path], text.values[path]) for text, path in paths])
    query = torch.cat([text.queries for text in texts])
    starts = torch.arange(len(query) + 1, dtype=torch.int32)
    lengths = torch.tensor([path.sum() for _, path in paths], dtype=torch.int32)
    shared = {"seq_lens": lengths, "query_start_loc": starts, "causal": True}
    sliding = -1 if window is None else window
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(query),
        num_heads=layout.heads,
        num_kv_heads=layout.kv_heads,
        head_dim=layout.head_size,
        dtype=layout.dtype,
        sliding_window_size=sliding,
        isa=layout.isa,
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
        scale=layout.head_size**-0.5,
        alibi_slopes=None,
        sliding_window=sliding,
        block_table=table,
        softcap=0.0,
        scheduler_metadata=metadata,
        s_aux=sinks,
        **shared,
    )
    return output


def compare(layout: Layout, texts: list[Text], window=None, sinks=None, *, own=False) -> None:
    step = Step.make(layout, texts, own=own)
    ours = step.tree_rows(step.attend(window=window, sinks=sinks))
    theirs = decode_rows(layout, texts, window, sinks)
    raw = torch.int16 if layout.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(ours.view(raw), theirs.view(raw))


@pytest.mark.parametrize("own", [False, True], ids=["cached", "own"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_row_has_the_bits_of_the_decode_row_of_its_path(layout, sinks, own):
    texts = random_texts(layout, (0, 5), (13, 1), (37, 24), (64, 40), (411, 16))
    # Every two values of the three together.
    for window in (None, 300) if sinks == own else (5,):
        compare(layout, texts, window, sinks_of(layout) if sinks else None, own=own)


def test_a_head_may_have_more_scores_than_are_kept_for_several():
    layout = Layout("vec", torch.float32, 32, 64, 12, 1)
    compare(layout, random_texts(layout, (3000, 5), (40, 5), (3000, 5)))


@pytest.mark.parametrize("own", [False, True], ids=["cached", "own"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bits_are_those_of_one_thread(layout, own):
    texts = random_texts(layout, (0, 5), (13, 1), (700, 40), (411, 16))
    step = Step.make(layout, texts, own=own)
    expected, before = None, torch.get_num_threads()
    try:
        for threads in [1, *[2, 4, 7] * 5]:
            torch.set_num_threads(threads)
            got = step.attend(window=300, sinks=sinks_of(layout))
            expected = got if expected is None else expected
            assert torch.equal(got, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sharpness", [0.01, 4, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_may_be_near_or_far_apart(dtype, sharpness):
    layout = Layout("vec", dtype, 64, 64, 9, 3)
    [text] = random_texts(layout, (400, 24))
    text.queries.mul_(sharpness)
    compare(layout, [text])


@pytest.mark.skipif(not HAS_AMX, reason="this CPU has no AMX")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_chains_in_the_amx_layout_have_the_bits_of_decode_rows(window, sinks):
    layout = Layout("amx", torch.bfloat16, 64, 64, 9, 3)
    texts = texts_of(layout, *((context, [0, *range(7)]) for context in (0, 13, 64, 411)))
    compare(layout, texts, window, sinks_of(layout) if sinks else None)
