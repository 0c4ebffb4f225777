"""Learning in Triton does what its reference does, bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch_twins_dynamic as twins
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_recycle.core.dynamic_operations import REFERENCE_DYNAMIC

from vllm_recycle.core import SCOPES
from vllm_recycle.core.acceptance import AcceptanceTable
from vllm_recycle.core.adjacency import AdjacencyMatrix, MatrixLayout
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.kernels.triton.matrix.count import DeviceCounts
from vllm_recycle.kernels.triton.matrix.learn import learn
from vllm_recycle.kernels.triton.text_tails import read_tails
from vllm_recycle.kernels.triton.top_k import top_k

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")

# The most probable tokens.


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(1, 1, 1), (3, 9, 8), (2, 90, 3), (2, 257, 16), (1, 64, 64)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    values=st.integers(1, 40),
)
def test_top_k_has_of_equal_logits_the_lower_token_first(seed, shape, dtype, values):
    num_rows, vocab_size, k = shape
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-values, values, (num_rows, vocab_size), generator=generator)
    logits = logits.to(DEVICE, dtype)
    best = top_k(logits, k)
    assert best.dtype == torch.int32
    assert best.equal(logits.sort(dim=1, descending=True, stable=True).indices[:, :k].int())


def test_top_k_takes_nan_for_the_least_and_reads_logits_of_any_strides():
    logits = torch.tensor([[NAN, 1.0, INF, -INF, 1.0], [-INF, NAN, -INF, NAN, 0.0]], device=DEVICE)
    padded = torch.full((2, 40), INF, device=DEVICE)
    padded[:, :5] = logits
    for view in (logits, padded[:, :5], logits.T.contiguous().T):
        assert top_k(view, 4).tolist() == [[2, 1, 4, 0], [4, 0, 1, 2]]


# The ends of texts.


@pytest.mark.parametrize("length_type", [torch.int32, torch.int64])
def test_tails_go_back_from_the_last_token_to_the_first(length_type):
    all_token_ids = torch.arange(24, dtype=torch.int32, device=DEVICE).reshape(3, 8)
    idx_mapping = torch.tensor([2, 0, 1], device=DEVICE)
    total_len = torch.tensor([2, 0, 5], dtype=length_type, device=DEVICE)
    tails = read_tails(all_token_ids, idx_mapping, total_len, reach=3)
    assert tails.dtype == torch.int64
    assert tails.tolist() == [[20, 19, 18], [1, 0, -1], [-1, -1, -1]]


# Rows and counts.

MAX_NUM_REQS = 4


def make_rows(scope: str, contexts: tuple[int, ...], k: int, *, vocab_size: int, slots: int):
    rows = AdjacencyMatrix(
        vocab_size,
        k,
        contexts=contexts,
        slots=slots,
        scope=scope,
        max_num_reqs=MAX_NUM_REQS,
        device=DEVICE,
    )
    for req_state_idx in (2, 0, 3, 1):
        rows.begin(req_state_idx)
    return rows


def make_step(seed: int, layout: MatrixLayout, *, max_rows: int, unfilled: float = 0.1) -> dict:
    """Some requests' trees with the target's tokens; of each, a path that the walk may take."""
    rng = random.Random(seed)
    batch = rng.sample(range(MAX_NUM_REQS), rng.randint(1, MAX_NUM_REQS))
    parents = torch.tensor(
        [[rng.randrange(row) if row else 0 for row in range(max_rows)] for _ in range(MAX_NUM_REQS)]
    )
    tokens, starts, tails, path, token_ids = [], [0], [], [], []
    for req_state_idx in batch:
        num_rows = rng.choice([0, 1, rng.randint(1, max_rows), max_rows])
        of_rows = [
            -1 if row and rng.random() < unfilled else rng.randrange(layout.vocab_size)
            for row in range(num_rows)
        ]
        text = [rng.randrange(layout.vocab_size) for _ in range(rng.randint(1, 2 * layout.reach))]
        tails.append([*of_rows[:1], *text, *[-1] * layout.reach][: layout.reach])
        visits = [0] if of_rows else []
        while visits:
            below = [
                row
                for row in range(1, num_rows)
                if parents[req_state_idx, row] == visits[-1] and of_rows[row] >= 0
            ]
            if not below or rng.random() < 0.1:
                break
            visits.append(rng.choice(below))
        emitted = [of_rows[row] for row in visits[1:]] + [rng.randrange(layout.vocab_size)]
        padding = [-1] * (max_rows - len(visits))
        path.append([*visits, *padding])
        token_ids.append([*emitted[: len(visits)], *padding])
        tokens += of_rows
        starts.append(len(tokens))
    successors = [rng.sample(range(layout.vocab_size), layout.k) for _ in range(len(tokens) + 1)]
    lengths = torch.tensor([sum(row >= 0 for row in visits) for visits in path], dtype=torch.int32)
    walked = WalkResult(torch.tensor(path), torch.tensor(token_ids), lengths)
    return {
        "layout": layout,
        "idx_mapping": torch.tensor(batch, dtype=torch.int32).to(DEVICE),
        "tails": torch.tensor(tails).to(DEVICE),
        "parents": parents.to(DEVICE),
        "row_token_ids": torch.tensor(tokens, dtype=torch.int64).to(DEVICE),
        "cu_num_logits": torch.tensor(starts, dtype=torch.int32).to(DEVICE),
        "successors": torch.tensor(successors, dtype=torch.int32).to(DEVICE),
        "walked": WalkResult(*(getattr(walked, name).to(DEVICE) for name in walked.__slots__)),
        "max_rows": max_rows,
    }


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scope=st.sampled_from(SCOPES),
    contexts=st.sampled_from([(1,), (1, 2), (1, 2, 4, 8)]),
    slots=st.sampled_from([1, 4, 64, 1 << 20]),
    max_rows=st.sampled_from([1, 5, 40]),
    counted=st.booleans(),
    some_learn=st.booleans(),
)
def test_a_step_is_learnt_at_once(seed, scope, contexts, slots, max_rows, counted, some_learn):
    k = 3
    rows = make_rows(scope, contexts, k, vocab_size=5, slots=slots)
    tables = [rows.table, rows.table.clone()]
    stamps = torch.zeros(len(rows.table), dtype=torch.int32, device=DEVICE)
    counts = [DeviceCounts.of(AcceptanceTable(rows.layout, device=DEVICE)) for _ in range(2)]
    # One more and these are halved.
    for each in counts:
        each.counts[0, ..., 1] = 1999.5
    for index in range(3):
        step = make_step(seed + index, rows.layout, max_rows=max_rows)
        step["salts"] = rows.salts
        if some_learn:
            batch = len(step["idx_mapping"])
            step["learns"] = torch.arange(batch, device=DEVICE) % 2 == seed % 2
        for table, each, function in zip(tables, counts, (learn, twins.learn), strict=True):
            function(table, stamps, each if counted else None, **step)
        assert tables[0].equal(tables[1])
        assert not stamps.any()
        for name in ("counts", "rates", "increments"):
            assert getattr(counts[0], name).equal(getattr(counts[1], name)), name


@pytest.mark.parametrize("scope", SCOPES)
def test_where_no_two_rows_have_one_address_it_is_what_rows_learn_one_by_one(scope):
    layouts = make_rows(scope, (1, 2, 4), 8, vocab_size=50_000, slots=1 << 22)
    tables = [layouts.table, layouts.table.clone()]
    stamps = torch.zeros(len(layouts.table), dtype=torch.int32, device=DEVICE)
    acceptance = AcceptanceTable(layouts.layout)
    counts = DeviceCounts.of(AcceptanceTable(layouts.layout, device=DEVICE))
    seeds = [0, 1, 2, 0, 1, 0, 2]  # what came before comes again: rows are found and steady
    for seed in seeds:
        step = make_step(seed, layouts.layout, max_rows=20, unfilled=0.0)
        learn(tables[0], stamps, counts, salts=layouts.salts, **step)
        step["salts"] = layouts.salts[step["idx_mapping"]]
        step["parents"] = step["parents"][step.pop("idx_mapping")]
        del step["max_rows"]
        REFERENCE_DYNAMIC.learn(tables[1], acceptance.counts, **step)
        assert tables[0].equal(tables[1])
        assert counts.counts.equal(acceptance.counts.to(DEVICE))
        assert counts.rates.equal(acceptance.rates().float().to(DEVICE))
    assert int((tables[0][:, 0] & 3).max()) == 3


def test_one_tree_for_all_has_a_stride_of_zero():
    rows = make_rows("sequence", (1, 2), 3, vocab_size=5, slots=64)
    step = make_step(7, rows.layout, max_rows=6)
    step["salts"] = rows.salts
    tables = [rows.table, rows.table.clone()]
    stamps = torch.zeros(len(rows.table), dtype=torch.int32, device=DEVICE)
    one = step["parents"][:1]
    step["walked"] = replace(step["walked"], path=torch.full_like(step["walked"].path, -1))
    learn(tables[0], stamps, None, **{**step, "parents": one.int().expand(MAX_NUM_REQS, -1)})
    twins.learn(tables[1], stamps, None, **{**step, "parents": one.repeat(MAX_NUM_REQS, 1)})
    assert tables[0].equal(tables[1])
    assert int((tables[0][:, 0] >= 0).sum()) > 3
