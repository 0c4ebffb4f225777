"""The C++ kernels give what the torch functions give that they are twins of, bit for bit.

Attention gives it within a tolerance, that of `test_tree_attention`, which has more of it.
"""

from __future__ import annotations

import pytest
import torch
from cache_layouts import STALE, skip_reason
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import trees
from tolerance import is_within_tolerance

from vllm_recycle.core import REFERENCE, TemplateMatrix
from vllm_recycle.core.tree import children_of
from vllm_recycle.kernels.cpu import build, tree_attention
from vllm_recycle.kernels.cpu.kv_cache import slot_elements
from vllm_recycle.kernels.cpu.tree_attention import TreeQueries

VOCAB, K, MAX_NUM_REQS = 40, 4, 3

pytestmark = pytest.mark.skipif(
    build.load_library() is None, reason="no C++ compiler on this machine"
)


@st.composite
def matrices(draw):
    scope = draw(st.sampled_from(["sequence", "shared", "isolated"]))
    hot_start = scope == "shared" or draw(st.booleans())
    options = {"scope": scope, "hot_start": hot_start, "max_num_reqs": MAX_NUM_REQS}
    return TemplateMatrix(VOCAB, K, overlay_rows=8, **options)


def rows(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    idx_mapping = torch.randint(MAX_NUM_REQS, (count,), generator=generator)
    token_ids = torch.randint(-1, VOCAB, (count,), generator=generator)
    # Distinct logits: torch says nothing about the order of equal ones.
    logits = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(count)])
    return idx_mapping, token_ids, logits


@settings(max_examples=60, deadline=None)
@given(matrix=matrices(), seed=st.integers(0, 10**6), bf16=st.booleans())
def test_update_equals_torch(matrix, seed, bf16):
    idx_mapping, token_ids, logits = rows(seed, 25)
    logits = logits.to(torch.bfloat16 if bf16 else torch.float32)
    expected, got = matrix.table.clone(), matrix.table.clone()
    REFERENCE.update_from_logits(expected, idx_mapping, token_ids, logits, layout=matrix.layout)
    build.update_from_logits(got, idx_mapping, token_ids, logits, layout=matrix.layout)
    expected[matrix.layout.dump_address] = got[matrix.layout.dump_address]
    assert torch.equal(got, expected)


@settings(max_examples=60, deadline=None)
@given(tree=trees(k=K), matrix=matrices(), seed=st.integers(0, 10**6))
def test_fill_and_walk_equal_torch(tree, matrix, seed):
    idx_mapping, token_ids, logits = rows(seed, 60)
    matrix.update(idx_mapping, token_ids, logits.topk(K).indices)
    last, who = torch.randint(VOCAB, (5,)), torch.randint(MAX_NUM_REQS, (5,))
    arguments = (matrix.table, who, last)
    drafts = REFERENCE.fill_tree(*arguments, tree=tree, layout=matrix.layout)
    assert torch.equal(build.fill_tree(*arguments, tree=tree, layout=matrix.layout), drafts)
    # Agree often, so that paths are deep.
    children = children_of(tree.parents[1:].tolist())
    first_child = [of_row[0] - 1 if of_row else 0 for of_row in children]
    sampled = torch.where(torch.rand(5, tree.num_nodes + 1) < 0.7, drafts[:, first_child], 7)
    # Of each tree a prefix is scheduled.
    num_rows = torch.randint(1, tree.num_nodes + 2, (5,))
    flat = torch.cat([rows[:count] for rows, count in zip(sampled, num_rows, strict=True)])
    starts = torch.nn.functional.pad(num_rows.cumsum(0), (1, 0)).to(torch.int32)
    expected, got = (walk(flat, drafts, starts, tree=tree) for walk in (REFERENCE.walk, build.walk))
    assert torch.equal(got.path, expected.path)
    assert torch.equal(got.token_ids, expected.token_ids)
    assert torch.equal(got.lengths, expected.lengths)


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
    for twin, output in ((tree_attention, expected), (build, got)):
        twin.tree_attention(query, kv_cache, output, **given)
    assert expected.isfinite().all()
    assert is_within_tolerance(got, expected)


def test_equal_logits_are_taken_in_order():
    matrix = TemplateMatrix(VOCAB, K, scope="shared")
    row = torch.zeros(1, dtype=torch.int64)
    build.update_from_logits(matrix.table, row, row, torch.ones(1, VOCAB), layout=matrix.layout)
    assert matrix.shared[0].tolist() == [0, 1, 2, 3]


def test_logits_of_other_types_and_strides_are_taken():
    matrix = TemplateMatrix(VOCAB, K, scope="shared")
    row = torch.zeros(1, dtype=torch.int64)
    logits = torch.arange(VOCAB).to(torch.float16)[:, None].T
    build.update_from_logits(matrix.table, row, row, logits, layout=matrix.layout)
    assert matrix.shared[0].tolist() == [39, 38, 37, 36]


def test_without_a_compiler_torch_does_the_work(monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    build.load_library.cache_clear()
    try:
        with caplog.at_level("WARNING"):
            assert build.native_operations() is REFERENCE
        assert "no g++ found" in caplog.text
    finally:
        build.load_library.cache_clear()
