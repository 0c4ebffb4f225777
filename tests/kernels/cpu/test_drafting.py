"""Drafting, learning and walking in C++ give what the reference gives, bit for bit."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.growth_settings import some_grammars, some_owner, some_trunks
from tests.core.recycling_steps import ends_of, make_matrix, started, write
from tests.core.strategies import trees
from tests.kernels.cpu.cache_layouts import STALE
from tests.kernels.triton.test_learn import MAX_NUM_REQS, make_step, part_of
from tests.kernels.triton.test_walk import ragged_steps
from vllm_recycle.core import reference
from vllm_recycle.core.adjacency import NUM_CLASSES, NUM_COUNTED, SCOPES, AdjacencyMatrix, Ends
from vllm_recycle.core.choose import Price
from vllm_recycle.core.curve import CHAINS, TREES, Load, MeasuredCurve
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.kernels.cpu import calls

VOCABS, LENGTHS = [3, 5, 40], [(1,), (1, 2), (1, 2, 3, 4), (1, 2, 4, 16)]


MANY = settings(max_examples=60, deadline=None)


@st.composite
def tables(draw) -> AdjacencyMatrix:
    """A matrix of which much is known, and requests that run."""
    matrix = make_matrix(
        draw(st.sampled_from(SCOPES)),
        vocab_size=draw(st.sampled_from(VOCABS)),
        k=draw(st.integers(1, 3)),
        contexts=draw(st.sampled_from(LENGTHS)),
        slots=draw(st.sampled_from([1, 4, 256])),
        max_num_reqs=MAX_NUM_REQS,
    )
    torch.manual_seed(draw(st.integers(0, 10**6)))
    for req_state_idx in range(MAX_NUM_REQS):
        for _ in range(1 + req_state_idx):
            matrix.begin(req_state_idx, req_state_idx % NUM_COUNTED, draw(some_owner(matrix)))
        reference.seed(matrix, req_state_idx, torch.tensor(random_texts(matrix, 1, 40)[0]))
    return matrix


def random_texts(matrix: AdjacencyMatrix, count: int, most: int = 12) -> list[list[int]]:
    """Texts that repeat themselves."""
    vocab, lengths = min(4, matrix.layout.vocab_size), torch.randint(1, most + 1, (count,)).tolist()
    return [torch.randint(vocab, (length,)).tolist() for length in lengths]


def counts_for(matrix: AdjacencyMatrix, rates: str) -> torch.Tensor:
    """Of rates that are quarters many are equal, so that the order decides; some may be none."""
    shape = (NUM_CLASSES, len(matrix.layout.contexts), 2, matrix.layout.k, 5)
    if rates == "quarters":
        right = torch.randint(5, shape).double()
        right[..., -1] = 0
        return torch.stack((right, torch.zeros(shape).double()), dim=-1)
    seen = torch.randint(3000, shape).double()
    counts = torch.stack(((seen * torch.rand(shape)).floor(), seen), dim=-1)
    if rates == "none":
        wrong = torch.tensor([math.nan, math.inf, -9.0, 1e6])[torch.randint(4, counts.shape)]
        counts = torch.where(torch.rand(counts.shape) < 0.2, wrong.double(), counts)
    return counts


@st.composite
def price_of(draw, num_rows: int) -> Price:
    """Any seconds that do not fall, or those of a row that always costs as much."""
    row_cost = draw(st.sampled_from([None, 0.0, 0.01, 0.1]))
    trust = draw(st.sampled_from([1.0, 0.5, 1.5]))
    if row_cost is not None:
        return linear(row_cost, num_rows)._replace(trust=trust)
    return Price(1 + torch.rand(num_rows + 1).double().cumsum(0) / 8, trust)


def linear(row_cost: float, num_rows: int) -> Price:
    return Price(MeasuredCurve.linear(row_cost, num_rows, [TREES]).by_rows(TREES, Load(1)))


@MANY
@given(
    matrix=tables(),
    batch=st.integers(1, 3),
    max_nodes=st.integers(1, 40),
    rates=st.sampled_from(["any", "quarters", "none"]),
    kinds=st.sampled_from([(TREES,), (CHAINS,), (TREES, CHAINS)]),
    has_flags=st.booleans(),
    data=st.data(),
)
def test_drafts_equal_those_of_the_reference(
    matrix, batch, max_nodes, rates, kinds, has_flags, data
):
    num_rows = data.draw(st.integers(1, 60))
    prices = {kind: data.draw(price_of(num_rows)) for kind in kinds}
    tree = data.draw(st.none() | trees(max_nodes=20, k=matrix.layout.k))
    ends = ends_of(random_texts(matrix, batch))
    if has_flags:
        ends = replace(ends, is_token=torch.rand(ends.token_ids.shape) < 0.9)
    tokens = min(4, matrix.layout.vocab_size)
    trunks = data.draw(st.none() | some_trunks(batch, tokens=tokens))
    grammars = data.draw(some_grammars(batch, tokens=tokens))
    depths = torch.randint(6, (batch,)).tolist()
    texts = TextEnds(torch.randperm(3)[:batch], ends, depths, trunks, grammars)
    counts, before = counts_for(matrix, rates), matrix.table.clone()
    options = {"max_nodes": max_nodes, "tree": tree}
    expected, got = (
        twin.draft(matrix, counts, texts, prices=prices, **options) for twin in (reference, calls)
    )
    assert got[:-1] == expected[:-1]
    assert got.expected == pytest.approx(expected.expected)
    assert all(draft[-1] >= 0 for draft in got[0] if draft)
    assert matrix.table.equal(before)


@pytest.mark.parametrize(("seconds", "draft"), [(1.5, []), (1.4375, [0])])
def test_a_node_that_just_pays_for_itself_is_left_out(seconds, draft):
    matrix, one = started(k=1), torch.tensor([0])
    write(matrix, 0, [1], [0])
    texts, counts = TextEnds(one, ends_of([[1]]), [1]), counts_for(matrix, "any")
    counts[..., 0], counts[..., 1] = 2.0, 4.0  # the node is right half of the time
    price, tree = Price(torch.tensor([1.0, 1.0, seconds]).double()), TreeTemplate(((0, 0),))
    for twin in (reference, calls):
        drafts = twin.draft(matrix, counts, texts, prices={TREES: price}, max_nodes=1, tree=tree)
        assert drafts.token_ids == [draft]


@MANY
@given(matrix=tables(), length=st.integers(0, 80), for_all=st.booleans())
def test_seed_equals_the_reference(matrix, length, for_all):
    text = torch.randint(min(4, matrix.layout.vocab_size), (length,))
    expected, got = copy.deepcopy(matrix), copy.deepcopy(matrix)
    for twin, one in ((reference, expected), (calls, got)):
        twin.seed(one.of_all() if for_all and one.layout.has_shared else one, 1, text)
    assert got.table.equal(expected.table)


@MANY
@given(step=ragged_steps())
def test_walk_equals_the_reference(step):
    rows, trees = step
    expected, got = (walk(*rows, trees=trees) for walk in (reference.walk, calls.walk))
    for name in ("path", "token_ids", "lengths"):
        assert getattr(got, name).equal(getattr(expected, name)), name


@MANY
@given(
    matrix=tables(),
    seed=st.integers(0, 10**6),
    max_rows=st.sampled_from([1, 5, 13]),
    counts=st.booleans(),
)
def test_learn_equals_the_reference(matrix, seed, max_rows, counts):
    layout = matrix.layout
    # Near the most that is counted, so that halving is seen.
    shape = (NUM_CLASSES, len(layout.contexts), 2, layout.k, 5, 2)
    counter = torch.randint(1990, 2001, shape).double() if counts else None
    expected, got = copy.deepcopy((matrix, counter)), (matrix, counter)
    for index in range(3):  # what is learnt first is read, and written over
        texts, step = make_step(seed + index, layout, max_rows=max_rows, device="cpu")
        part = part_of(texts, step, [*range(len(step.idx_mapping))])
        reference.learn(*expected, *part)
        calls.learn(*got, *part)
        assert got[0].table.equal(expected[0].table)
        assert not counts or got[1].equal(expected[1])


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
    expected = reference.top_k(logits, k)
    if layout == "columns":
        logits = logits.T.contiguous().T
    elif layout == "part":
        logits = torch.cat([logits, torch.full_like(logits, STALE)], 1)[:, :vocab]
    for got, by_torch in zip(calls.top_k(logits, k), expected, strict=True):
        assert got.dtype == by_torch.dtype
        assert got.equal(by_torch)


def test_of_equal_logits_the_first_ones_are_taken_and_of_no_numbers_the_first_one():
    assert calls.top_k(torch.ones(1, 40), 3)[0].tolist() == [[0, 1, 2]]
    for twin in (reference, calls):
        assert twin.top_k(torch.full((2, 40), float("nan")), 3)[1].tolist() == [0, 0]


# What C++ cannot be trusted with.


def test_a_table_of_another_type_or_layout_is_refused():
    matrix, text = make_matrix(), torch.tensor([0, 1, 2])
    for table in (matrix.table.long(), matrix.table.T.contiguous().T):
        other = copy.copy(matrix)
        other.table = table
        with pytest.raises(AssertionError):
            calls.seed(other, 0, text)
    texts = TextEnds(torch.tensor([0]), Ends(torch.tensor([[1]]), [0]), [1])  # int64 token ids
    counts, prices = counts_for(matrix, "quarters"), {TREES: linear(0.0, 4)}
    with pytest.raises(AssertionError):
        calls.draft(matrix, counts, texts, prices=prices, max_nodes=2)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_a_grammar_or_a_signal_raises_meanwhile_is_raised(error):
    class Raising:
        def allowed(self, path):
            raise error

    matrix = make_matrix()
    ends = Ends(torch.tensor([[1]], dtype=torch.int32), [0])
    texts = TextEnds(torch.tensor([0]), ends, [1], grammars=[Raising()])
    counts, prices = counts_for(matrix, "quarters"), {TREES: linear(0.0, 4)}
    with pytest.raises(error):
        calls.draft(matrix, counts, texts, prices=prices, max_nodes=2)
