"""The entries of prompts in Triton are those of its reference, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.triton.test_learn import DEVICE, MAX_NUM_REQS, make_matrix
from vllm_recycle.core import learn as core
from vllm_recycle.core.adjacency import MAX_STEADINESS, SCOPES, AdjacencyMatrix
from vllm_recycle.kernels.triton.matrix.seed import seed


def make_texts(rng: random.Random, vocab_size: int, length: int) -> torch.Tensor:
    """int32 [max_num_reqs, length], whose phrases come again."""
    phrases = [[rng.randrange(vocab_size) for _ in range(6)] for _ in range(4)]
    texts = [
        [token for _ in range(length) for token in rng.choice(phrases)[: rng.randint(2, 6)]]
        for _ in range(MAX_NUM_REQS)
    ]
    return torch.tensor([text[:length] for text in texts], dtype=torch.int32).to(DEVICE)


def take_in(
    function: Callable, matrix: AdjacencyMatrix, texts: list, indices: list[int], **given: int
) -> None:
    """Seed texts of some requests."""
    stamps = torch.zeros(len(matrix.table), dtype=torch.int32, device=DEVICE)
    of_texts = {"req_state_indices": indices, "lengths": [*map(len, texts)]}
    function(matrix, stamps, torch.cat(texts).to(DEVICE), **of_texts, **given)
    assert not stamps.any()


def seed_in_python(matrix, stamps, token_ids, *, req_state_indices, lengths, slice_size) -> None:
    """What is correct, where a slice of a prompt is taken in at once.

    `core.learn.seed` goes position by position. Both are the same where nothing is lost.
    """
    assert not stamps.any()
    layout = matrix.layout
    texts = [text.tolist() for text in token_ids.split(list(lengths))]
    positions = [
        (req_state_idx, text, end)
        for req_state_idx, text in zip(req_state_indices, texts, strict=True)
        for end in range(1, len(text))
    ]
    for first in range(0, len(positions), slice_size):
        # By address, what was found of it in order: (head, salt), follower, rest.
        found: dict[int, list[tuple[tuple[int, int], int, list[int]]]] = {}
        for req_state_idx, text, end in positions[first : first + slice_size]:
            salt = int(matrix.salts[req_state_idx])
            if not 0 <= text[end] < layout.vocab_size:
                continue
            context = text[max(0, end - layout.reach) : end][::-1]
            known = {
                index: matrix.table[address, 1:-1].tolist()
                for address, index, _ in matrix.known_entries(context, salt)
            }
            for index, own, address, head in layout.each_address(context, salt):
                if bool(own) == layout.has_own:
                    rest = known.get(index, known.get(0, []))
                    one = ((head, salt if own else 0), text[end], rest)
                    found.setdefault(address, []).append(one)
        merged = {address: merged_entry(matrix, address, seen) for address, seen in found.items()}
        for address, entry in merged.items():
            matrix.table[address] = torch.tensor(entry, dtype=torch.int32)


def merged_entry(matrix: AdjacencyMatrix, address: int, seen: list[tuple]) -> list[int]:
    """Of what was found in order: (head, salt), follower, rest."""
    (head, salt), _, rest = seen[-1]
    followers = [follower for context, follower, _ in reversed(seen) if context == (head, salt)]
    latest = list(dict.fromkeys(followers))[:3]
    run = next((i for i, token in enumerate(followers) if token != latest[0]), len(followers))
    old, first = matrix.table[address, :2].tolist()
    stays = matrix.is_written(address, head, salt) and first == latest[0] and len(latest) == 1
    steadiness = min(MAX_STEADINESS, (old & 3) + run if stays else run - 1)
    successors = [*latest, *(token for token in rest if token >= 0 and token not in latest)]
    successors = [*successors, *[-1] * matrix.layout.k][: matrix.layout.k]
    return [head | steadiness, *successors, salt]


@settings(max_examples=12, deadline=None)
@given(
    seeding=st.integers(0, 10**6),
    scope=st.sampled_from(SCOPES),
    contexts=st.sampled_from([(1,), (1, 2), (1, 2, 4, 16)]),
    slots=st.sampled_from([4, 64, 1 << 20]),
    slice_size=st.sampled_from([3, 16, 512]),
    k=st.sampled_from([2, 5]),
)
def test_texts_are_seeded_a_slice_at_a_time(seeding, scope, contexts, slots, slice_size, k):
    rng = random.Random(seeding)
    matrix = make_matrix(scope, contexts, k, vocab_size=7, slots=slots)
    expected = copy.deepcopy(matrix)
    for _ in range(2):
        all_token_ids = make_texts(rng, 8, 30)  # one is no token of the vocabulary
        indices = rng.sample(range(MAX_NUM_REQS), rng.randint(1, MAX_NUM_REQS))
        lengths = [rng.choice([1, 2, rng.randint(3, 30), 30]) for _ in indices]
        texts = [all_token_ids[i, :length] for i, length in zip(indices, lengths, strict=True)]
        for one, function in ((matrix, seed), (expected, seed_in_python)):
            take_in(function, one, texts, indices, slice_size=slice_size)
        assert matrix.table.equal(expected.table)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("contexts", "slice_size"), [((1, 2, 4), 1), ((1,), 7)])
def test_where_nothing_is_lost_it_is_what_is_seeded_one_by_one(scope, contexts, slice_size):
    """A position at a time; or contexts that have no more than three followers."""
    matrix = make_matrix(scope, contexts, 4, vocab_size=40, slots=1 << 20)
    expected = copy.deepcopy(matrix)
    rng = random.Random(1)
    texts = [[0], [5]]
    for text in texts:
        while len(text) < 25:
            text.append((3 * text[-1] + rng.choice([1, 1, 1, 2, 3])) % 40)
    texts = [torch.tensor(text, dtype=torch.int32) for text in (texts[0], texts[1][:18])]
    take_in(seed, matrix, texts, [0, 1], slice_size=slice_size)
    for req_state_idx, text in enumerate(texts):
        core.seed(expected, req_state_idx, text)
    assert matrix.table.equal(expected.table)
    assert matrix.num_written > 10


@pytest.mark.parametrize("scope", ["sequence", "shared"])
def test_a_text_that_is_nobodys_is_seeded_for_all(scope):
    matrix = make_matrix(scope, (1, 2, 4), 4, vocab_size=40, slots=1 << 20)
    matrix.begin(0)
    expected, before = copy.deepcopy(matrix), matrix.table.clone()
    text = torch.tensor([3 * place % 37 for place in range(50)], dtype=torch.int32, device=DEVICE)
    take_in(seed, matrix.of_all(), [text], [0])
    core.seed(expected.of_all(), 0, text)
    assert matrix.table.equal(expected.table)
    assert matrix.shared_entries().equal(matrix.table)
    assert not matrix.table.equal(before)
