"""Growing, learning and walking in C++ give what their references give, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_layouts import STALE
from hypothesis import given, settings
from hypothesis import strategies as st
from recycling_steps import make_rows, tails_of
from strategies import batch_trees, repetitive_drafts, samples, trees
from vllm_recycle.core.dynamic_operations import REFERENCE_DYNAMIC

from vllm_recycle.core import REFERENCE, SCOPES, Trees, WalkResult
from vllm_recycle.core.adjacency import AdjacencyMatrix
from vllm_recycle.core.price import StepTimes
from vllm_recycle.core.token_recycling import TokenRecyclingProposer, TokenRecyclingState
from vllm_recycle.kernels.cpu import build
from vllm_recycle.kernels.cpu.drafting import native_dynamic_operations

VOCABS, LENGTHS = [3, 5, 40], [(1,), (1, 2), (1, 2, 3, 4), (1, 2, 4, 8)]

pytestmark = pytest.mark.skipif(
    build.load_library() is None, reason="no C++ compiler on this machine"
)

MANY = settings(max_examples=60, deadline=None)


@st.composite
def tables(draw) -> AdjacencyMatrix:
    """Rows of which many are known, and three requests that run."""
    scope = draw(st.sampled_from(SCOPES))
    rows = make_rows(
        scope,
        vocab_size=draw(st.sampled_from(VOCABS)),
        k=draw(st.integers(1, 3)),
        contexts=draw(st.sampled_from(LENGTHS)),
        slots=draw(st.sampled_from([1, 4, 256])),
        hot_start=scope == "shared" or draw(st.booleans()),
    )
    torch.manual_seed(draw(st.integers(0, 10**6)))
    for req_state_idx in range(3):
        for _ in range(1 + req_state_idx):
            rows.begin(req_state_idx)
        text, salt = random_texts(rows, 1, 40)[0], int(rows.salts[req_state_idx])
        REFERENCE_DYNAMIC.seed(rows.table, torch.tensor(text), salt, layout=rows.layout)
    return rows


def random_texts(rows: AdjacencyMatrix, count: int, most: int = 12) -> list[list[int]]:
    """Texts that repeat themselves."""
    vocab, lengths = min(4, rows.layout.vocab_size), torch.randint(1, most + 1, (count,)).tolist()
    return [torch.randint(vocab, (length,)).tolist() for length in lengths]


def assert_same_walks(got: WalkResult, expected: WalkResult) -> None:
    for name in ("path", "token_ids", "lengths"):
        assert getattr(got, name).equal(getattr(expected, name)), name


def assert_same_trees(got: Trees, expected: Trees) -> None:
    for name in ("parents", "depths", "ancestor_mask"):
        assert getattr(got, name).equal(getattr(expected, name)), name


@MANY
@given(rows=tables(), data=st.data(), batch=st.integers(1, 3), max_nodes=st.integers(1, 20))
def test_grow_equals_the_reference(rows, data, batch, max_nodes):
    num_rows = data.draw(st.integers(1, 40))
    kind = data.draw(st.sampled_from(["linear", "free", "rising"]))
    if kind == "rising":
        step_times = StepTimes({(1, 0): torch.rand(num_rows + 1).cumsum(0).tolist()})
    else:
        step_times = StepTimes.linear(0.05 if kind == "linear" else 0.0, num_rows)
    shape = (len(rows.layout.contexts), 2, rows.layout.k, 4)
    # Of quarters many are equal, so that the order decides.
    equal = data.draw(st.booleans())
    rates = torch.randint(5, shape).double() / 4 if equal else torch.rand(shape).double()
    times, slopes = step_times.at(1, 0)
    arguments = {
        "layout": rows.layout,
        "salts": rows.salts[torch.randperm(3)[:batch]],
        "tails": tails_of(random_texts(rows, batch), rows.layout.reach),
        "max_depths": torch.randint(6, (batch,)),
        "times": times,
        "slopes": slopes,
        "num_other_rows": data.draw(st.integers(0, 4)),
        "max_nodes": max_nodes,
    }
    before = rows.table.clone()
    expected = REFERENCE_DYNAMIC.grow(rows.table, rates, **arguments)
    got = native_dynamic_operations().grow(rows.table, rates, **arguments)
    assert got.num_nodes.equal(expected.num_nodes)
    assert got.token_ids.equal(expected.token_ids)
    assert_same_trees(got.trees, expected.trees)
    assert rows.table.equal(before)


@MANY
@given(rows=tables(), length=st.integers(0, 30))
def test_seed_equals_the_reference(rows, length):
    text = torch.randint(min(4, rows.layout.vocab_size), (length,))
    expected, got = rows.table.clone(), rows.table.clone()
    REFERENCE_DYNAMIC.seed(expected, text, 2, layout=rows.layout)
    native_dynamic_operations().seed(got, text, 2, layout=rows.layout)
    assert got.equal(expected)


@MANY
@given(rows=tables(), data=st.data(), batch=st.integers(1, 3), counts=st.booleans())
def test_walk_and_learn_equal_the_reference(rows, data, batch, counts):
    layout = rows.layout
    templates = [data.draw(trees(max_nodes=12)) for _ in range(batch)]
    drafts = [data.draw(repetitive_drafts(template)) for template in templates]
    token_ids, sampled, starts = [], [], [0]
    for template, draft, text in zip(templates, drafts, random_texts(rows, batch), strict=True):
        count = data.draw(st.integers(0, template.num_nodes))
        at_rows = data.draw(samples(template, draft, vocab_size=layout.vocab_size))
        token_ids += [text[-1], *draft[:count]]
        sampled += at_rows[: count + 1]
        starts.append(len(sampled))
    tree = batch_trees(templates)
    padded = torch.tensor([[*draft, *[-1] * (tree.num_nodes - len(draft))] for draft in drafts])
    flat, cu_num_logits = torch.tensor(sampled), torch.tensor(starts)
    expected, got = (
        walk(flat, padded, cu_num_logits, tree=tree) for walk in (REFERENCE.walk, build.walk)
    )
    assert_same_walks(got, expected)
    others = torch.rand(len(sampled), layout.vocab_size).argsort(1)[:, : layout.k]
    others[:, 0] = flat
    # Near the most that is counted, so that halving is seen.
    shape = (len(layout.contexts), 2, layout.k, 5, 2)
    seen = [torch.randint(1990, 2001, shape).double() if counts else None]
    seen += [counter if counter is None else counter.clone() for counter in seen]
    tables = [rows.table.clone(), rows.table.clone()]
    twins = (REFERENCE_DYNAMIC, native_dynamic_operations())
    for twin, table, counter in zip(twins, tables, seen, strict=True):
        twin.learn(
            table,
            counter,
            layout=layout,
            salts=rows.salts[:batch],
            tails=tails_of(random_texts_like(token_ids, starts), layout.reach),
            parents=tree.parents,
            row_token_ids=torch.tensor(token_ids),
            cu_num_logits=cu_num_logits,
            successors=others.int(),
            walked=expected,
        )
    assert tables[1].equal(tables[0])
    if counts:
        assert seen[1].equal(seen[0])


def random_texts_like(token_ids: list[int], starts: list[int]) -> list[list[int]]:
    """Texts that end with the tokens of the roots."""
    return [[0, 1, 2, token_ids[start]][-1 - start % 4 :] for start in starts[:-1]]


@settings(max_examples=40, deadline=None)
@given(
    scope=st.sampled_from(SCOPES),
    vocab_size=st.sampled_from([5, 40]),
    k=st.sampled_from([1, 3, 4]),
    contexts=st.sampled_from(LENGTHS),
    slots=st.sampled_from([16, 256]),
    row_cost=st.sampled_from([0.0, 0.01, 0.1, 0.3]),
    max_nodes=st.sampled_from([1, 7, 20]),
    seed=st.integers(0, 10**6),
)
def test_a_number_of_steps_leaves_the_same_rows_and_counts(
    scope, vocab_size, k, contexts, slots, row_cost, max_nodes, seed
):
    torch.manual_seed(seed)
    reference, twin = proposers = [
        TokenRecyclingProposer(
            TokenRecyclingState(
                make_rows(scope, vocab_size=vocab_size, k=k, contexts=contexts, slots=slots)
            ),
            max_nodes=max_nodes,
            max_num_reqs=3,
            operations=operations,
            dynamic_operations=dynamic_operations,
        )
        for operations, dynamic_operations in (
            (REFERENCE, REFERENCE_DYNAMIC),
            (build.native_operations(), native_dynamic_operations()),
        )
    ]
    times, slopes = StepTimes.linear(row_cost, 60).at(3, 0)
    texts = random_texts(reference.state.rows, 2, 30)
    idx_mapping = torch.tensor([2, 0])
    for proposer in proposers:
        for req_state_idx, text in zip(idx_mapping.tolist(), texts, strict=True):
            proposer.begin(req_state_idx, torch.tensor(text))
    for _ in range(3):
        tails = tails_of(texts, reference.layout.reach)
        max_depths = torch.tensor([0, 2, 50, 50])[torch.randint(4, (2,))]
        drafts, same = (
            proposer.propose(
                idx_mapping,
                tails,
                max_depths=max_depths,
                times=times,
                slopes=slopes,
                num_other_rows=1,
            )
            for proposer in proposers
        )
        assert same.equal(drafts)
        tree = reference.trees_of(idx_mapping)
        assert_same_trees(twin.trees_of(idx_mapping), tree)
        counts = [int(torch.randint(int((draft >= 0).sum()) + 1, ())) for draft in drafts]
        row_token_ids = torch.cat(
            [
                torch.tensor([text[-1], *draft[:count].tolist()])
                for text, draft, count in zip(texts, drafts, counts, strict=True)
            ]
        )
        cu_num_logits = torch.tensor([0, *(count + 1 for count in counts)]).cumsum(0)
        # Mostly the target agrees with the first draft below a row.
        logits = torch.rand(len(row_token_ids), vocab_size)
        for b, (draft, count) in enumerate(zip(drafts.tolist(), counts, strict=True)):
            for row in range(count, 0, -1):
                parent = cu_num_logits[b] + tree.parents[b, row]
                logits[parent, draft[row - 1]] += float(torch.rand(()) < 0.7)
        successors = twin.dynamic_operations.top_k(logits, k)
        assert successors.equal(REFERENCE_DYNAMIC.top_k(logits, k))
        walks = [
            proposer.operations.walk(successors[:, 0].long(), drafts, cu_num_logits, tree=tree)
            for proposer in proposers
        ]
        assert_same_walks(walks[1], walks[0])
        for proposer in proposers:
            proposer.learn(
                idx_mapping, tails, tree, row_token_ids, cu_num_logits, successors, walks[0]
            )
        for got, expected in zip(twin.state.tensors, reference.state.tensors, strict=True):
            assert got.equal(expected)
        for text, emitted in zip(texts, walks[0].token_ids.tolist(), strict=True):
            text += [token for token in emitted if token >= 0]


# Top k.


@MANY
@given(
    count=st.integers(0, 5),
    vocab=st.integers(8, 250),
    k=st.integers(1, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    layout=st.sampled_from(["rows", "columns", "part"]),
    seed=st.integers(0, 10**6),
)
def test_top_k_equals_torch(count, vocab, k, dtype, layout, seed):
    torch.manual_seed(seed)
    # Distinct logits, in bfloat16 too: torch says nothing about the order of equal ones.
    logits = torch.rand(count, vocab).argsort(1).to(dtype) - 100
    expected = REFERENCE_DYNAMIC.top_k(logits, k)
    if layout == "columns":
        logits = logits.T.contiguous().T
    elif layout == "part":
        logits = torch.cat([logits, torch.full_like(logits, STALE)], 1)[:, :vocab]
    got = native_dynamic_operations().top_k(logits, k)
    assert got.dtype == torch.int32
    assert got.equal(expected)


def test_of_equal_logits_the_first_ones_are_taken():
    assert native_dynamic_operations().top_k(torch.ones(1, 40), 3).tolist() == [[0, 1, 2]]


# What C++ cannot be trusted with.


def test_a_table_of_another_type_or_layout_is_refused():
    operations, rows = native_dynamic_operations(), make_rows()
    text = torch.tensor([0, 1, 2])
    for table in (rows.table.long(), rows.table.T.contiguous().T):
        with pytest.raises(AssertionError):
            operations.seed(table, text, 1, layout=rows.layout)
    longer = replace(rows.layout, contexts=(1, 2, 3))
    with pytest.raises(AssertionError):
        operations.grow(
            rows.table,
            torch.zeros(2, 2, 3, 4, dtype=torch.float64),
            layout=longer,
            salts=rows.salts[:1],
            tails=torch.tensor([[0, 1]]),
            max_depths=torch.tensor([1]),
            times=torch.ones(3, dtype=torch.float64),
            slopes=torch.zeros(3, dtype=torch.float64),
            num_other_rows=0,
            max_nodes=2,
        )


def test_without_a_compiler_the_reference_does_the_work(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    build.load_library.cache_clear()
    try:
        assert native_dynamic_operations() is REFERENCE_DYNAMIC
    finally:
        build.load_library.cache_clear()
