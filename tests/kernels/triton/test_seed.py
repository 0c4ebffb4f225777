"""The entries of prompts in Triton are those of the core, bit for bit."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.triton.test_learn import DEVICE, MAX_NUM_REQS, make_matrix
from vllm_recycle.core import learn as core
from vllm_recycle.core.adjacency import SCOPES, AdjacencyMatrix
from vllm_recycle.kernels.triton.matrix.seed import seed


def make_text(rng: random.Random, vocab_size: int, length: int) -> torch.Tensor:
    """int32 [length], whose phrases come again."""
    phrases = [[rng.randrange(vocab_size) for _ in range(6)] for _ in range(4)]
    text = [token for _ in range(length) for token in rng.choice(phrases)[: rng.randint(2, 6)]]
    return torch.tensor(text[:length], dtype=torch.int32)


def take_in(matrix: AdjacencyMatrix, req_state_idx: int, text: torch.Tensor) -> None:
    stamps = torch.zeros(len(matrix.table), dtype=torch.int32, device=DEVICE)
    seed(matrix, stamps, req_state_idx, text.to(DEVICE))
    assert not stamps.any()


@settings(max_examples=12, deadline=None)
@given(
    seeding=st.integers(0, 10**6),
    scope=st.sampled_from(SCOPES),
    contexts=st.sampled_from([(1,), (1, 2), (1, 2, 4, 16)]),
    slots=st.sampled_from([4, 64, 1 << 20]),
    k=st.sampled_from([1, 2, 5]),
)
def test_entries_are_those_of_the_core(seeding, scope, contexts, slots, k):
    rng = random.Random(seeding)
    matrix = make_matrix(scope, contexts, k, vocab_size=7, slots=slots)
    expected = copy.deepcopy(matrix)
    for length in (rng.randint(1, 30), *rng.sample((2, 33, 34, 80), 2)):
        req_state_idx = rng.randrange(MAX_NUM_REQS)
        text = make_text(rng, 8, length)  # one is no token of the vocabulary
        take_in(matrix, req_state_idx, text)
        core.seed(expected, req_state_idx, text)
        assert matrix.table.equal(expected.table)


@pytest.mark.parametrize("scope", ["sequence", "shared"])
def test_a_text_that_is_nobodys_is_seeded_for_all(scope):
    matrix = make_matrix(scope, (1, 2, 4), 4, vocab_size=40, slots=1 << 20)
    matrix.begin(0)
    expected, before = copy.deepcopy(matrix), matrix.table.clone()
    text = torch.tensor([3 * place % 37 for place in range(50)], dtype=torch.int32, device=DEVICE)
    take_in(matrix.of_all(), 0, text)
    core.seed(expected.of_all(), 0, text)
    assert matrix.table.equal(expected.table)
    assert matrix.shared_entries().equal(matrix.table)
    assert not matrix.table.equal(before)
