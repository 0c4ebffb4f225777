"""Token Recycling: what it learns from logits and prompts, and how requests are numbered."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import THOROUGH, K

from vllm_recycle.core import ReqStateIndices, TemplateMatrix, TemplateProposer, TreeTemplate

VOCAB = 9
TREE = TreeTemplate(((0, 0), (1, K - 1)))
MAX_NUM_REQS = 2
STARTS = torch.tensor([0, 1])  # of no account here


def make_proposer(*, seed_from_prompt=True, **options) -> TemplateProposer:
    matrix = TemplateMatrix(VOCAB, K, max_num_reqs=MAX_NUM_REQS, **options)
    return TemplateProposer(matrix, TREE, seed_from_prompt=seed_from_prompt)


def begin(proposer: TemplateProposer, prompts: dict[int, list[int]]) -> None:
    idx_mapping = [req_state_idx for req_state_idx, prompt in prompts.items() for _ in prompt]
    tokens = [token for prompt in prompts.values() for token in prompt]
    proposer.begin(
        torch.tensor(idx_mapping, dtype=torch.int64), torch.tensor(tokens, dtype=torch.int64)
    )


def rows_seen(proposer: TemplateProposer, req_state_idx: int) -> list[list[int]]:
    tokens = torch.arange(VOCAB)
    return proposer.matrix.rows_of(torch.full_like(tokens, req_state_idx), tokens).tolist()


def seed_by_hand(known: list[list[int]], prompt: list[int]) -> list[list[int]]:
    """Each token's followers in the prompt, the latest first, then what was known, cut to k."""
    rows = []
    for token, successors in enumerate(known):
        followers = [b for a, b in pairwise(prompt) if a == token]
        candidates = [*reversed(followers), *(successors if followers else [])]
        distinct = [found for found in dict.fromkeys(candidates) if found >= 0]
        rows.append([*distinct, *[-1] * K][:K] if followers else successors)
    return rows


def test_observe_writes_the_most_probable_successors_of_every_row():
    proposer = make_proposer()
    order = torch.stack([torch.randperm(VOCAB, generator=torch.manual_seed(i)) for i in range(4)])
    # Logits fall along each order; the third row is to be ignored, the last repeats a token.
    logits = torch.zeros(4, VOCAB).scatter_(1, order, -torch.arange(4 * VOCAB).view(4, -1).float())
    proposer.observe(torch.tensor([0, 0, 1, 0]), torch.tensor([2, 5, -1, 2]), logits, STARTS)
    expected = [[-1] * K] * VOCAB
    expected[5], expected[2] = order[1, :K].tolist(), order[3, :K].tolist()
    assert rows_seen(proposer, 0) == expected


def test_propose_drafts_from_what_was_observed():
    proposer = make_proposer()
    logits = torch.zeros(2, VOCAB)
    logits[0, 4] = 1.0
    logits[1, [7, 6, 5, 3]] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    proposer.observe(torch.tensor([0, 0]), torch.tensor([1, 4]), logits, STARTS)
    drafted = proposer.propose(torch.tensor([0, 0]), torch.tensor([1, 8]))
    assert drafted.tolist() == [[4, 3], [-1, -1]]


@pytest.mark.parametrize("scope", ["sequence", "isolated", "shared"])
@THOROUGH
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=30), min_size=1, max_size=3),
    data=st.data(),
)
def test_begin_enters_the_bigrams_of_the_prompt_one_by_one(scope, prompts, data):
    proposer = make_proposer(scope=scope)
    for prompt in prompts:
        req_state_idx = data.draw(st.integers(0, MAX_NUM_REQS - 1))
        expected = seed_by_hand(rows_seen(proposer, req_state_idx), prompt)
        begin(proposer, {req_state_idx: prompt})
        assert rows_seen(proposer, req_state_idx) == expected


@THOROUGH
@given(prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=20), min_size=2, max_size=2))
def test_sequences_that_begin_together_do_not_mix(prompts):
    together, apart = make_proposer(scope="isolated"), make_proposer(scope="isolated")
    begin(together, dict(enumerate(prompts)))
    for req_state_idx, prompt in enumerate(prompts):
        begin(apart, {req_state_idx: prompt})
    for req_state_idx in range(MAX_NUM_REQS):
        assert rows_seen(together, req_state_idx) == rows_seen(apart, req_state_idx)


def test_begin_leaves_the_matrix_alone_unless_asked_to_seed():
    for seed_from_prompt, num_written in ((True, 2), (False, 0)):
        proposer = make_proposer(seed_from_prompt=seed_from_prompt)
        begin(proposer, {0: [1, 2, 3]})
        assert proposer.matrix.num_written == num_written


def test_release_forgets_what_the_sequence_saw_and_no_other():
    proposer = make_proposer(scope="isolated")
    begin(proposer, {req_state_idx: [1, 2] for req_state_idx in range(MAX_NUM_REQS)})
    proposer.release([0])
    assert rows_seen(proposer, 0)[1] == [-1] * K
    assert rows_seen(proposer, 1)[1] == [2, *[-1] * (K - 1)]


def test_a_tree_with_ranks_that_the_matrix_lacks_is_refused():
    TemplateProposer(TemplateMatrix(VOCAB, K), TREE)
    with pytest.raises(ValueError, match=rf"node 1: rank {K - 1} is not below k = {K - 1}"):
        TemplateProposer(TemplateMatrix(VOCAB, K - 1), TREE)


# Numbers of requests' states.


@THOROUGH
@given(events=st.lists(st.sets(st.sampled_from("abcdef"), max_size=4), max_size=12))
def test_each_request_gets_the_lowest_number_that_is_free(events):
    """Each event names requests: those running end, then the others start, in order."""
    capacity = 6
    numbers = ReqStateIndices(capacity)
    expected: dict[str, int] = {}
    for event in map(sorted, events):
        starting = [request for request in event if request not in expected]
        ended = [expected.pop(request) for request in event if request in expected]
        # Those that start have no number yet: freeing them as well changes nothing.
        assert numbers.free(event) == ended
        for request in starting:
            expected[request] = min(set(range(capacity)) - set(expected.values()))
            assert numbers.assign(request) == expected[request]
        assert len(numbers) == len(expected)
        assert {request: numbers[request] for request in expected} == expected
        assert all((request in numbers) == (request in expected) for request in "abcdef")


def test_unknown_requests_have_no_number_to_take_back():
    numbers = ReqStateIndices(2)
    numbers.assign("a")
    assert numbers.free(["b", "a", "a"]) == [0]
    assert numbers.free(["a"]) == []
    with pytest.raises(KeyError):
        numbers["a"]
