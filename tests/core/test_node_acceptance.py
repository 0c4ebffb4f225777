"""What the nodes of a template are worth: counted by hand, and the prefix by brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import THOROUGH, trees

from vllm_recycle.core import TreeTemplate, walk
from vllm_recycle.core.acceptance import MOST_SEEN, PRIOR_WEIGHT
from vllm_recycle.core.node_acceptance import PRIOR, NodeAcceptance, best_prefix

# A trunk of two, and a phrase of two below the root.
TREE = TreeTemplate(((0, 0), (1, 0), (0, 1), (3, 0)))


def counted(acceptance: NodeAcceptance) -> list[tuple[float, float]]:
    """Of each node how often it was right, and seen, without what it began with."""
    start = torch.tensor([PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT])
    return [tuple(pair) for pair in (acceptance.counts - start).tolist()]


def step(acceptance: NodeAcceptance, drafts: list[int], sampled: list[int]) -> None:
    """One request whose first rows were verified: as many as were sampled for."""
    drafted, starts = torch.tensor([drafts]), torch.tensor([0, len(sampled)])
    acceptance.count(drafted, walk(torch.tensor(sampled), drafted, starts, tree=TREE))


def test_nodes_below_visited_rows_are_counted():
    acceptance = NodeAcceptance(TREE)
    step(acceptance, [7, 8, 5, 6], [7, 8, 9, 0, 0])
    assert counted(acceptance) == [(1, 1), (1, 1), (0, 1), (0, 0)]


def test_nodes_that_were_not_verified_are_counted_as_far_as_the_text_is_known():
    acceptance = NodeAcceptance(TREE)
    step(acceptance, [7, 8, 5, 6], [5])
    step(acceptance, [7, 8, 5, -1], [7, 3])
    assert counted(acceptance) == [(1, 2), (0, 1), (1, 2), (0, 0)]


def test_what_was_not_drafted_is_not_counted():
    acceptance = NodeAcceptance(TREE)
    step(acceptance, [-1, -1, 5, 6], [5, 0, 0, 6, 1])
    assert counted(acceptance) == [(0, 0), (0, 0), (1, 1), (1, 1)]


def test_old_counts_fade():
    acceptance = NodeAcceptance(TREE)
    for _ in range(int(MOST_SEEN)):
        step(acceptance, [7, -1, -1, -1], [7])
    assert acceptance.counts[0, 1] < 0.6 * MOST_SEEN
    acceptance.clear()
    assert counted(acceptance) == [(0, 0)] * 4


def test_a_node_is_worth_the_product_along_its_path():
    acceptance = NodeAcceptance(TREE)
    acceptance.counts[:] = torch.tensor([[1, 2], [1, 4], [3, 4], [1, 1]])
    drafts = torch.tensor([[7, 8, 5, 6], [7, -1, -1, 6]])
    assert acceptance.worths(drafts).tolist() == [[0.5, 0.125, 0.75, 0.75], [0.5, 0, 0, 0]]


@THOROUGH
@given(
    tree=trees(max_nodes=12),
    rises=st.lists(st.sampled_from([0, 0, 1, 1, 2, 4]), min_size=3, max_size=40),
    batch=st.integers(1, 3),
    num_other_rows=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_no_other_prefix_gives_more_tokens_for_the_time(tree, rises, batch, num_other_rows, seed):
    torch.manual_seed(seed)
    # Eighths: sums are exact.
    worths = torch.randint(0, 9, (batch, tree.num_nodes)).double() / 8
    times = (8 + torch.tensor([0, *rises])).cumsum(0).double()

    def gain(count: int) -> float:
        rows = batch + num_other_rows
        for row in worths[:, :count].tolist():
            while row and not row[-1]:
                row.pop()
            rows += len(row)
        if rows >= len(times) and count:
            return 0.0
        tokens = batch + num_other_rows + float(worths[:, :count].sum())
        return tokens / float(times[min(rows, len(times) - 1)])

    gains = [gain(count) for count in range(tree.num_nodes + 1)]
    assert best_prefix(worths, num_other_rows, times) == gains.index(max(gains))


@pytest.mark.parametrize(("cost", "expected"), [(0.0, 4), (0.2, 2), (0.6, 0)])
def test_the_dearer_a_row_the_fewer_nodes(cost, expected):
    worths = torch.tensor([[0.5, 0.4, 0.1, 0.05]], dtype=torch.float64)
    times = 1 + cost * torch.arange(-1, 20).double()
    assert best_prefix(worths, 0, times) == expected
