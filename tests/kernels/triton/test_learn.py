"""Learning in Triton does what the core does, bit for bit."""

from __future__ import annotations

import copy
import random

import recycling_steps
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_recycle.core import learn as core
from vllm_recycle.core.acceptance import AcceptanceTable
from vllm_recycle.core.adjacency import NUM_COUNTED, SCOPES, AdjacencyMatrix, Ends, MatrixLayout
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.owners import Owner
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.kernels.triton.matrix.count import DeviceCounts
from vllm_recycle.kernels.triton.matrix.find import Texts
from vllm_recycle.kernels.triton.matrix.learn import learn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Entries and counts.

MAX_NUM_REQS = 4
OWNERS = [None, Owner("a"), Owner("a"), Owner("a", "salt")]  # by `req_state_idx`


def make_matrix(scope: str, contexts: tuple[int, ...], k: int, **sizes: int) -> AdjacencyMatrix:
    """On the device, with all requests running."""
    given = {"contexts": contexts, "k": k, "max_num_reqs": MAX_NUM_REQS, "device": DEVICE, **sizes}
    matrix = recycling_steps.make_matrix(scope, **given)
    owners = [None] * 4 if scope == "isolated" else OWNERS
    for req_state_idx in (2, 0, 3, 1):
        matrix.begin(req_state_idx, req_state_idx % NUM_COUNTED, owners[req_state_idx])
    return matrix


def make_step(
    seed: int, layout: MatrixLayout, *, max_rows: int, unfilled: float = 0.1
) -> tuple[torch.Tensor, VerifiedStep]:
    """Some requests' texts, and trees with the target's tokens and a path of each to be walked."""
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
    step = VerifiedStep(
        idx_mapping=torch.tensor(batch, dtype=torch.int32).to(DEVICE),
        parents=parents.to(DEVICE, torch.int32),
        row_token_ids=torch.tensor(tokens, dtype=torch.int64).to(DEVICE),
        cu_num_logits=torch.tensor(starts, dtype=torch.int32).to(DEVICE),
        successors=torch.tensor(successors, dtype=torch.int32).to(DEVICE),
        walked=WalkResult(*(getattr(walked, name).to(DEVICE) for name in walked.__slots__)),
    )
    return torch.tensor(tails).to(DEVICE), step


def texts_of(tails: torch.Tensor, step: VerifiedStep) -> Texts:
    """Where the device reads the ends of the step's texts."""
    texts = [[token for token in tail if token >= 0][::-1] for tail in tails.tolist()]
    token_ids = torch.full((MAX_NUM_REQS, 20), -9, dtype=torch.int32)
    lengths = torch.zeros(MAX_NUM_REQS, dtype=torch.int32)
    for state, text in zip(step.idx_mapping.tolist(), texts, strict=True):
        token_ids[state, : len(text)] = torch.tensor(text, dtype=torch.int32)
        lengths[state] = len(text)
    return Texts(token_ids.to(DEVICE), lengths.to(DEVICE))


def part_of(step: VerifiedStep, learns: list[int]) -> VerifiedStep:
    """The requests of a step of which it is said that they teach, as the core takes them."""
    starts, states = step.cu_num_logits.tolist(), step.idx_mapping[learns].long()
    rows = [row for b in learns for row in range(starts[b], starts[b + 1])]
    return VerifiedStep(
        idx_mapping=states,
        parents=step.parents[states].long(),
        row_token_ids=step.row_token_ids[rows],
        cu_num_logits=torch.tensor([0, *(starts[b + 1] - starts[b] for b in learns)]).cumsum(0),
        successors=step.successors[rows],
        walked=WalkResult(*(getattr(step.walked, name)[learns] for name in step.walked.__slots__)),
    )


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scope=st.sampled_from(SCOPES),
    contexts=st.sampled_from([(1,), (1, 2), (1, 2, 4, 16)]),
    slots=st.sampled_from([1, 4, 64, 1 << 20]),
    max_rows=st.sampled_from([1, 5, 40]),
    counted=st.booleans(),
    some_learn=st.booleans(),
)
def test_a_step_teaches_what_it_teaches_the_core(
    seed, scope, contexts, slots, max_rows, counted, some_learn
):
    matrix = make_matrix(scope, contexts, 3, vocab_size=5, slots=slots)
    expected = copy.deepcopy(matrix)
    stamps = torch.zeros(len(matrix.table), dtype=torch.int32, device=DEVICE)
    acceptance, theirs = (AcceptanceTable(matrix.layout, device=DEVICE) for _ in range(2))
    # One more and these are halved.
    for table in (acceptance, theirs):
        table.counts[:, 0, ..., 1] = 1999.5
    counts = DeviceCounts.of(acceptance) if counted else None
    for index in range(3):
        tails, step = make_step(seed + index, matrix.layout, max_rows=max_rows)
        batch = len(tails)
        learns = [b for b in range(batch) if not some_learn or b % 2 == seed % 2]
        which = torch.arange(batch, device=DEVICE) % 2 == seed % 2 if some_learn else None
        texts = texts_of(tails, step)
        learn(matrix, stamps, counts, texts, step, max_rows=max_rows, learns=which)
        their_counts = theirs.counts if counted else None
        part = part_of(step, learns)
        last = (texts.lengths[part.idx_mapping] - 1).tolist()
        ends = Ends(texts.token_ids[part.idx_mapping], last)
        core.learn(expected, their_counts, ends, part)
        assert matrix.table.equal(expected.table)
        assert not stamps.any()
        assert acceptance.counts.equal(theirs.counts)
        if counts is not None:
            assert counts.rates.equal(theirs.rates().float())
            assert not counts.increments.any()


def test_entries_become_steady():
    matrix = make_matrix("sequence", (1, 2, 4), 8, vocab_size=50_000, slots=1 << 22)
    stamps = torch.zeros(len(matrix.table), dtype=torch.int32, device=DEVICE)
    for seed in [0, 1, 2, 0, 1, 0, 2, 0]:  # what came before comes again
        tails, step = make_step(seed, matrix.layout, max_rows=20, unfilled=0.0)
        learn(matrix, stamps, None, texts_of(tails, step), step, max_rows=20)
    assert int((matrix.table[:, 0] & 3).max()) == 3
