"""Learning in Triton does what the core does, bit for bit."""

from __future__ import annotations

import copy
import random
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core import recycling_steps
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
    seed: int, layout: MatrixLayout, *, max_rows: int, device: torch.device | str = DEVICE
) -> tuple[Texts, VerifiedStep]:
    """Some requests' texts, and trees with the target's tokens and a path of each to be walked."""
    rng = random.Random(seed)
    batch = rng.sample(range(MAX_NUM_REQS), rng.randint(1, MAX_NUM_REQS))

    def any_tokens(count: int) -> list[int]:
        return [rng.randrange(layout.vocab_size) for _ in range(count)]

    parents = [[rng.randrange(max(1, row)) for row in range(max_rows)] for _ in range(MAX_NUM_REQS)]
    texts = Texts(torch.full((MAX_NUM_REQS, 20), -9), torch.zeros(MAX_NUM_REQS))
    tokens, starts, path, token_ids = [], [0], [], []
    for req_state_idx in batch:
        num_rows = rng.choice([0, 1, rng.randint(1, max_rows), max_rows])
        of_rows = any_tokens(num_rows)
        of_rows[1:] = [-1 if rng.random() < 0.1 else token for token in of_rows[1:]]
        text = [*any_tokens(rng.randint(1, 2 * layout.reach)), *of_rows[:1]][-layout.reach :]
        texts.token_ids[req_state_idx, : len(text)] = torch.tensor(text)
        texts.lengths[req_state_idx] = len(text)
        visits = [0][:num_rows]
        for row in range(1, num_rows):
            is_below = parents[req_state_idx][row] == visits[-1] and of_rows[row] >= 0
            visits += [row] * (is_below and rng.random() < 0.7)
        emitted = [*(of_rows[row] for row in visits[1:]), *any_tokens(1)]
        padding = [-1] * (max_rows - len(visits))
        path.append([*visits, *padding])
        token_ids.append([*emitted[: len(visits)], *padding])
        tokens += of_rows
        starts.append(len(tokens))
    successors = [rng.sample(range(layout.vocab_size), layout.k) for _ in range(len(tokens) + 1)]
    lengths = [sum(row >= 0 for row in visits) for visits in path]
    narrow = partial(torch.tensor, dtype=torch.int32, device=device)
    wide = partial(torch.tensor, dtype=torch.int64, device=device)
    step = VerifiedStep(
        idx_mapping=narrow(batch),
        parents=narrow(parents),
        row_token_ids=wide(tokens),
        cu_num_logits=narrow(starts),
        successors=narrow(successors),
        walked=WalkResult(wide(path), wide(token_ids), narrow(lengths)),
    )
    return Texts(*(values.to(device, torch.int32) for values in texts)), step


def part_of(texts: Texts, step: VerifiedStep, learns: list[int]) -> tuple[Ends, VerifiedStep]:
    """The requests of a step of which it is said that they teach, as the core takes them."""
    starts, states = step.cu_num_logits.tolist(), step.idx_mapping[learns].long()
    rows = [row for b in learns for row in range(starts[b], starts[b + 1])]
    part = VerifiedStep(
        idx_mapping=states,
        parents=step.parents[states].long(),
        row_token_ids=step.row_token_ids[rows],
        cu_num_logits=torch.tensor([0, *(starts[b + 1] - starts[b] for b in learns)]).cumsum(0),
        successors=step.successors[rows],
        walked=WalkResult(*(getattr(step.walked, name)[learns] for name in step.walked.__slots__)),
    )
    return Ends(texts.token_ids[states], (texts.lengths[states] - 1).tolist()), part


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
    for index in (0, 1, 0, 0, 0, 0):  # what comes again becomes steady
        texts, step = make_step(seed + index, matrix.layout, max_rows=max_rows)
        batch = len(step.idx_mapping)
        learns = [b for b in range(batch) if not some_learn or b % 2 == seed % 2]
        which = torch.arange(batch, device=DEVICE) % 2 == seed % 2 if some_learn else None
        learn(matrix, stamps, counts, texts, step, max_rows=max_rows, learns=which)
        their_counts = theirs.counts if counted else None
        core.learn(expected, their_counts, *part_of(texts, step, learns))
        assert matrix.table.equal(expected.table)
        assert not stamps.any()
        assert acceptance.counts.equal(theirs.counts)
        if counts is not None:
            assert counts.rates.equal(theirs.rates().float())
            assert not counts.increments.any()
