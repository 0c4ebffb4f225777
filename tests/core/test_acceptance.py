"""How often drafts are right: what is counted, what is shipped, and what follows from both."""

from __future__ import annotations

import pytest
import torch

from tests.core.recycling_steps import K, address_of, learn_text, make_matrix, verify
from vllm_recycle.core.acceptance import AcceptanceTable
from vllm_recycle.core.adjacency import GREEDY, NUM_CLASSES, SAMPLED, MatrixLayout
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.token_recycling import TokenRecyclingProposer, TokenRecyclingState
from vllm_recycle.core.tree import Trees

ANY = 4  # where the counts of all steadinesses are
OWN, SHARED = 1, 0


def make_proposer(scope="sequence", **options) -> TokenRecyclingProposer:
    """One with two requests running, and no counts."""
    state = TokenRecyclingState(make_matrix(scope, **options))
    state.acceptance.counts.zero_()
    proposer = TokenRecyclingProposer(state, max_nodes=4, seeds_from_prompts=False)
    proposer.add_request(NewRequest(0, []))
    proposer.add_request(NewRequest(1, []))
    return proposer


def write(
    proposer: TokenRecyclingProposer, context, successors, *, own: bool, steadiness=0
) -> None:
    """An entry of request 0, or of all; of this context alone."""
    matrix = proposer.state.matrix
    salt = int(matrix.salts[0])
    address = address_of(matrix.layout, context, salt, own=own)
    heads = {place[2]: place[3] for place in matrix.layout.each_address(context, salt)}
    for _ in range(steadiness + 1):
        matrix.write_entry(address, heads[address], salt if own else 0, successors)


def counted(
    proposer: TokenRecyclingProposer, request_class: int = GREEDY
) -> dict[tuple[int, ...], tuple[float, float]]:
    """By length, own, rank and steadiness: how often it was right, and seen."""
    counts, lengths = proposer.state.acceptance.counts[request_class], proposer.layout.contexts
    places = counts[..., 1].nonzero().tolist()
    return {(lengths[at[0]], *at[1:]): tuple(counts[tuple(at)].tolist()) for at in places}


# Counting.


def test_a_step_without_drafts_teaches_all_ranks_of_what_may_be_drafted_from():
    proposer = make_proposer()
    write(proposer, [2], [6, 6, 6], own=True)  # shorter than what is known
    write(proposer, [2, 1], [4, -1, -1], own=False)  # another's of the same length
    write(proposer, [2, 1], [3, 4, -1], own=True, steadiness=2)
    learn_text(proposer, 0, [1, 2], [4, 0, 3])
    assert counted(proposer) == {
        (2, OWN, 0, 2): (0, 1),
        (2, OWN, 0, ANY): (0, 1),
        (2, OWN, 1, 2): (1, 1),
        (2, OWN, 1, ANY): (1, 1),
        (2, SHARED, 0, 0): (1, 1),
        (2, SHARED, 0, ANY): (1, 1),
    }


def test_greedy_and_sampled_requests_are_counted_apart():
    proposer = make_proposer(contexts=(1,))
    proposer.add_request(NewRequest(1, [], SAMPLED))
    write(proposer, [2], [3, 4, 5], own=False)
    learn_text(proposer, 1, [2], [3, 0, 1])
    assert counted(proposer) == {}
    of_sampled = counted(proposer, SAMPLED)
    assert of_sampled[1, SHARED, 0, 0] == (1, 1)
    learn_text(proposer, 0, [2], [3, 0, 1])
    assert counted(proposer)[1, SHARED, 0, 1] == (1, 1)  # steadier since the other one wrote it
    assert counted(proposer, SAMPLED) == of_sampled


def test_visited_rows_count_and_others_do_not():
    proposer = make_proposer(contexts=(1,))
    for token, successors in ((0, [1, 2, 3]), (1, [5, 6, 4]), (2, [0, 1, 5]), (4, [6, 5, 3])):
        write(proposer, [token], successors, own=False, steadiness=token % 3)
    # Below 0 both 2 and 1 are drafted, and 4 below 1: the walk goes 0, 1, 4 and ends with 3.
    follower = {0: 1, 1: 4, 2: 0, 4: 3}
    trees = Trees.from_parents(torch.tensor([[0, 0, 0, 2, 0]]))
    drafts = torch.tensor([[2, 1, 4, -1]])
    one, target = torch.tensor([0]), lambda text: [follower[text[-1]], 0, 0]
    walked = verify(proposer, one, [[0]], target, trees, drafts, [3])
    assert walked.path.tolist() == [[0, 2, 3]]
    # Of 0 the first rank was right; of 1 and 4, which are steadier, the last.
    expected = {
        (1, SHARED, rank, steadiness): (right[rank], len(rows))
        for steadiness, rows, right in (
            (0, [0], [1, 0, 0]),
            (1, [1, 4], [0, 0, 2]),
            (ANY, [0, 1, 4], [1, 0, 2]),
        )
        for rank in range(K)
    }
    assert counted(proposer) == expected


def test_above_two_thousand_both_numbers_are_halved():
    proposer = make_proposer(contexts=(1,))
    write(proposer, [2], [3, 4, 5], own=True)
    cells = proposer.state.acceptance.counts[GREEDY, 0, OWN]
    cells[0, 0] = torch.tensor([700.0, 2000.0])
    cells[1, 0] = torch.tensor([701.0, 1999.0])
    cells[2, 0] = torch.tensor([3.0, 9.0])
    cells[0, ANY] = torch.tensor([100.0, 2000.0])
    learn_text(proposer, 0, [2], [3, 0, 1])
    assert cells[:, 0].tolist() == [[350.5, 1000.5], [701, 2000], [3, 10]]
    assert cells[0, ANY].tolist() == [50.5, 1000.5]


@pytest.mark.parametrize(("scope", "counts_shared"), [("isolated", False), ("sequence", True)])
def test_isolated_requests_leave_the_counts_alone(scope, counts_shared):
    proposer = make_proposer(scope)
    write(proposer, [2], [3, 4, 5], own=True)
    learn_text(proposer, 0, [2], [3, 0, 1])
    assert bool(counted(proposer)) == counts_shared
    matrix = proposer.state.matrix
    learned = matrix.table[address_of(matrix.layout, [2], int(matrix.salts[0]), own=True)]
    assert learned[1:-1].tolist() == [3, 0, 1]


# Rates.


def layout_of(contexts=(1,), k=K) -> MatrixLayout:
    return make_matrix(contexts=contexts, k=k).layout


def test_a_rate_leans_on_that_of_all_steadinesses():
    table = AcceptanceTable(layout_of((1, 2)))
    table.counts.zero_()
    table.counts[GREEDY, 1, OWN, 2, :, 0] = torch.tensor([0, 3, 6, 21, 30.0])
    table.counts[GREEDY, 1, OWN, 2, :, 1] = torch.tensor([0, 6, 16, 24, 60.0])
    rates = table.rates()
    assert rates.shape == (NUM_CLASSES, 2, 2, K, 4)
    assert rates[GREEDY, 1, OWN, 2].tolist() == [2 / 4, 5 / 10, 8 / 20, 23 / 28]
    assert int(rates.count_nonzero()) == 4  # what was never seen is not drafted


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("k", [1, 3, 8, 20])
def test_for_every_length_and_k_sane_counts_are_shipped(length, k):
    table = AcceptanceTable(layout_of((1,) if length == 1 else (1, length), k))
    right, seen = table.counts.unbind(-1)
    assert ((right >= 0) & (right <= seen)).all()
    assert seen[..., ANY].min() > 0
    assert seen.max() < 200.001  # an engine soon has more of its own
    rates = table.rates()
    assert ((rates >= 0) & (rates <= 1)).all()
    # The first successor is right more often than the second one is.
    if k > 1:
        assert (rates[..., 0, :] > rates[..., 1, :]).all()


def test_ranks_that_were_not_measured_have_the_counts_of_the_last_one():
    of_eight, of_two, of_ten = (
        AcceptanceTable(layout_of((1, 2), k)).counts.transpose(0, 3) for k in (8, 2, 10)
    )  # by rank
    assert of_two.equal(of_eight[:2])
    assert of_ten.equal(of_eight[[*range(8), 7, 7]])


def test_what_an_engine_counts_does_not_reach_what_is_shipped():
    proposer, shipped = make_proposer(), AcceptanceTable(layout_of((1, 2))).counts
    proposer.state.clear()
    counts = proposer.state.acceptance.counts
    assert counts.equal(shipped)
    write(proposer, [2, 1], [3, 4, 5], own=True)
    learn_text(proposer, 0, [1, 2], [3, 4, 5])
    assert not counts.equal(shipped)
    proposer.state.clear()
    assert counts.equal(shipped)
    assert AcceptanceTable(layout_of((1, 2))).counts.equal(shipped)
