"""Building the C++ kernels, and their attention against that of torch; see `test_drafting` too.

Attention agrees within a tolerance, that of `test_tree_attention`, which has more of it.
"""

from __future__ import annotations

import pytest
import torch
from cache_layouts import STALE, skip_reason
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import trees
from tolerance import is_within_tolerance

from vllm_recycle.core import reference
from vllm_recycle.kernels.cpu import build, calls, native_operations, tree_attention
from vllm_recycle.kernels.cpu.kv_cache import slot_elements
from vllm_recycle.kernels.cpu.tree_attention import TreeQueries

pytestmark = pytest.mark.skipif(
    build.load_library() is None, reason="no C++ compiler on this machine"
)


BLOCK_SIZE, NUM_BLOCKS, KV_HEADS, HEAD_SIZE = 32, 12, 2, 32


@settings(max_examples=60, deadline=None)
@given(tree=trees(), data=st.data(), group=st.integers(1, 4), isa=st.sampled_from(["amx", "vec"]))
def test_attention_with_own_keys_and_values_equals_torch(tree, data, group, isa):
    dtype = torch.bfloat16
    if isa == "vec" or skip_reason("amx"):
        isa, dtype = "vec", data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    torch.manual_seed(0)
    size = st.tuples(st.integers(0, 4 * BLOCK_SIZE), st.integers(1, tree.num_nodes + 1))
    num_context, num_rows = torch.tensor(data.draw(st.lists(size, min_size=1, max_size=3))).T
    # Behind the contexts: blocks out of range, and in their last block anything.
    stale = data.draw(st.sampled_from([float("nan"), STALE]))
    kv_cache = torch.full((NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), stale).to(dtype)
    blocks = torch.randperm(NUM_BLOCKS).view(3, 4)[: len(num_context)]
    token = torch.arange(4 * BLOCK_SIZE)
    in_context = token < num_context[:, None]
    slots = (blocks[:, token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE)[in_context]
    elements = slot_elements(slots, shape=kv_cache.shape, isa=isa)
    kv_cache.view(-1)[elements] = torch.randn(elements.shape).to(dtype)
    trees = TreeQueries(
        trees=tree.of_batch(len(num_rows)),
        first=num_rows.cumsum(0) - num_rows,
        num_rows=num_rows.contiguous(),
        num_context=num_context.contiguous(),
        block_table=blocks.where(in_context[:, ::BLOCK_SIZE], 2**30).int(),
        block_size=BLOCK_SIZE,
    )
    tokens = int(num_rows.sum())
    query = torch.randn(tokens, KV_HEADS * group, HEAD_SIZE).to(dtype)
    own = torch.randn(tokens, 2, KV_HEADS, HEAD_SIZE).to(dtype).unbind(1)
    expected, got = torch.empty_like(query), torch.empty_like(query)
    window = data.draw(st.none() | st.integers(1, 3 * BLOCK_SIZE))
    given = {"trees": trees, "scale": 0.2, "isa": isa, "own": own, "window": window}
    for twin, output in ((tree_attention, expected), (calls, got)):
        twin.tree_attention(query, kv_cache, output, **given)
    assert expected.isfinite().all()
    assert is_within_tolerance(got, expected)


def test_without_a_compiler_the_reference_does_the_work(monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    build.load_library.cache_clear()
    try:
        with caplog.at_level("WARNING"):
            assert native_operations() is native_operations() is reference
        (message,) = [record.message for record in caplog.records]
        assert "no C++ compiler found" in message
        assert message.endswith("install the package g++")
    finally:
        build.load_library.cache_clear()
