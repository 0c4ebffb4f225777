"""What a step, and a prompt, write into the adjacency matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.recycling_steps import VOCAB, K, ends_of, seen, started, write
from tests.core.strategies import THOROUGH
from vllm_recycle.core.adjacency import GREEDY, NUM_CLASSES, SCOPES
from vllm_recycle.core.learn import SLICE, VerifiedStep, learn, seed
from vllm_recycle.core.verification import WalkResult

CONTEXTS = (1, 2, 4)
tokens = st.integers(0, 3)
contexts = st.lists(tokens, min_size=1, max_size=4)


def test_the_accepted_path_is_written_last():
    matrix = started()
    # Row 1 is accepted; row 3 has its token too, below a sibling that is not.
    parents, row_token_ids = torch.tensor([[0, 0, 0, 2]]), torch.tensor([0, 1, 2, 1])
    step = VerifiedStep(
        idx_mapping=torch.tensor([0]),
        parents=parents,
        row_token_ids=row_token_ids,
        cu_num_logits=torch.tensor([0, 4]),
        successors=torch.tensor([[1, 2, 3], [3, 4, 5], [6, 5, 4], [2, 3, 4]], dtype=torch.int32),
        walked=WalkResult(torch.tensor([[0, 1]]), torch.tensor([[1, 3]]), torch.tensor([2])),
    )
    learn(matrix, None, ends_of([[5, 0]]), step)
    assert seen(matrix, 0, [1]) == seen(matrix, 1, [1]) == [3, 4, 5]
    # Each has its own entry of a longer context.
    assert seen(matrix, 0, [0, 5]) == [1, 2, 3]
    assert seen(matrix, 0, [1, 0]) == [3, 4, 5]
    assert seen(matrix, 0, [2, 0]) == [6, 5, 4]
    assert seen(matrix, 0, [1, 2]) == [2, 3, 4]


def test_what_is_read_is_as_it_was_before_the_step():
    matrix = started("shared", contexts=(1,))
    write(matrix, 0, [1], [3, 4, 5])
    counts = torch.zeros(NUM_CLASSES, 1, 2, K, 5, 2, dtype=torch.float64)
    # Two rows of one token, of which the last one stays, and two requests that are at it.
    step = VerifiedStep(
        idx_mapping=torch.tensor([0, 1]),
        parents=torch.zeros(2, 2, dtype=torch.int64),
        row_token_ids=torch.tensor([1, 1, 1]),
        cu_num_logits=torch.tensor([0, 2, 3]),
        successors=torch.tensor([[3, 0, 2], [5, 6, 0], [3, 6, 0]], dtype=torch.int32),
        walked=WalkResult(torch.tensor([[0], [0]]), torch.tensor([[4], [4]]), torch.tensor([1, 1])),
    )
    learn(matrix, counts, ends_of([[1], [1]]), step)
    assert seen(matrix, 0, [1]) == [3, 6, 0]
    assert int(matrix.table[1, 0]) & 3 == 1  # steadier than before by one, whatever came between
    [[shared, own]] = counts[GREEDY]
    assert shared[:, 0].tolist() == [[0, 2], [2, 2], [0, 2]]
    assert shared[:, 4].equal(shared[:, 0])
    assert not own.any()


def test_nothing_is_learnt_where_a_node_was_not_filled_and_below():
    matrix = started("shared", contexts=(1,))
    step = VerifiedStep(
        idx_mapping=torch.tensor([0]),
        parents=torch.tensor([[0, 0, 1, 0]]),
        row_token_ids=torch.tensor([-1, -1, 2, 3]),
        cu_num_logits=torch.tensor([0, 4]),
        successors=torch.arange(12).view(4, K).int(),
        walked=WalkResult(torch.tensor([[0]]), torch.tensor([[6]]), torch.tensor([1])),
    )
    learn(matrix, None, replace(ends_of([[0]]), last_positions=[-1]), step)
    assert [token for token in range(VOCAB) if seen(matrix, 0, [token])] == [3]


# The entries of a prompt.


@pytest.mark.parametrize("scope", SCOPES)
@THOROUGH
@given(text=st.lists(tokens, max_size=20), known=st.lists(contexts, max_size=3))
def test_a_seeded_entry_has_what_followed_last_and_then_others_once(scope, text, known):
    matrix = started(scope, contexts=CONTEXTS, slots=1 << 16)
    for context in known:
        write(matrix, 1, context, [2, 0, -1])
    before = matrix.shared_entries()
    seed(matrix, 0, torch.tensor(text, dtype=torch.int64))
    # It is for all only where there are no own entries, which may take the places of others.
    after = matrix.shared_entries()
    assert scope == "shared" or bool(((after == before) | (after == -1)).all())
    for end in range(1, len(text)):
        context = text[:end][::-1][: matrix.layout.reach]
        later = [text[:e][::-1][: len(context)] for e in range(end + 1, len(text))]
        found = matrix.longest_entries(context, int(matrix.salts[0]))
        if not found:
            continue  # other contexts have taken its places
        address, index, own = found[-1]
        successors = matrix.table[address, 1:-1].tolist()
        kept = [token for token in successors if token >= 0]
        assert kept == list(dict.fromkeys(kept))
        assert successors[len(kept) :] == [-1] * (K - len(kept))
        # Not where the text came by again, or another context has taken the place.
        if CONTEXTS[index] == len(context) and context not in later:
            assert own == (scope != "shared")
            assert successors[0] == text[end]


def test_what_was_known_before_the_slice_stays_behind_the_follower():
    matrix = started()
    write(matrix, 1, [1], [5, 2, 6])  # for all
    seed(matrix, 0, torch.tensor([0, 1, 2, 0, 1, 3]))
    # Of what followed within a slice the last one stays, before what was known for all.
    assert seen(matrix, 0, [1]) == [3, 5, 2]
    assert seen(matrix, 0, [1, 0]) == [3, 5, 2]
    assert seen(matrix, 0, [0, 2]) == [1, -1, -1]
    assert seen(matrix, 1, [1]) == [5, 2, 6]
    # In another slice its own entry is what was known.
    seed(matrix, 0, torch.tensor([2] * SLICE + [0, 1, 4]))
    assert seen(matrix, 0, [1]) == [4, 3, 5]
