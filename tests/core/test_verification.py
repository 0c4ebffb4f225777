"""The walk: against a plain loop, and against going down one level at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import THOROUGH, drafts, samples, trees

from vllm_recycle.core import TreeTemplate, WalkResult, step_down, walk

VOCAB = 7


@st.composite
def steps(draw) -> tuple[TreeTemplate, list[list[int]], list[list[int]]]:
    """A tree, the drafts of one to three sequences, and the tokens sampled at all rows."""
    tree = draw(trees(max_nodes=30))
    drafted = [draw(drafts(tree, vocab_size=VOCAB)) for _ in range(draw(st.integers(1, 3)))]
    return tree, drafted, [draw(samples(tree, draft, vocab_size=VOCAB)) for draft in drafted]


def walk_by_hand(tree: TreeTemplate, draft: list[int], sampled: list[int]) -> list[int]:
    """`sampled` has a token for each row that is scheduled."""
    path = [0]
    while True:
        row = path[-1]
        following = [
            node
            for node, (parent, _) in enumerate(tree.nodes[: len(sampled) - 1], start=1)
            if parent == row and draft[node - 1] == sampled[row]
        ]
        if not following:
            return path
        (node,) = following
        path.append(node)


def walk_all(
    sampled: list[list[int]], drafted: list[list[int]], *, tree: TreeTemplate
) -> WalkResult:
    """The walk of sequences that may have fewer rows than the tree."""
    starts = torch.tensor([0, *(len(rows) for rows in sampled)]).cumsum(0)
    flat = torch.tensor([token for rows in sampled for token in rows])
    return walk(flat, torch.tensor(drafted), starts, tree=tree)


def padded(values: list[int], width: int) -> list[int]:
    return [*values, *[-1] * (width - len(values))]


@THOROUGH
@given(step=steps(), data=st.data())
def test_walk_follows_the_drafts_as_a_plain_loop_does(step, data):
    tree, drafted, sampled = step
    # Only a prefix of each tree may be scheduled; the drafts of the rest are there all the same.
    sampled = [rows[: data.draw(st.integers(1, len(rows)))] for rows in sampled]
    result = walk_all(sampled, drafted, tree=tree)
    for sequence, (draft, tokens) in enumerate(zip(drafted, sampled, strict=True)):
        path = walk_by_hand(tree, draft, tokens)
        emitted = [tokens[row] for row in path]
        assert result.path[sequence].tolist() == padded(path, tree.depth + 1)
        assert result.token_ids[sequence].tolist() == padded(emitted, tree.depth + 1)
        assert result.lengths[sequence] == len(path)


@THOROUGH
@given(step=steps())
def test_stepping_down_reaches_the_path_of_the_walk(step):
    tree, drafted, sampled = step
    all_sampled, all_drafts = torch.tensor(sampled), torch.tensor(drafted)
    row = torch.zeros(len(drafted), dtype=torch.int64)
    path = [row]
    for _ in range(tree.depth):
        there = all_sampled.gather(1, row.clamp(min=0)[:, None]).flatten()
        row = step_down(row, there, all_drafts, tree=tree)
        path.append(row)
    assert torch.stack(path, dim=1).equal(walk_all(sampled, drafted, tree=tree).path)
    there = all_sampled.gather(1, row.clamp(min=0)[:, None]).flatten()
    assert step_down(row, there, all_drafts, tree=tree).eq(-1).all()


def test_the_walk_ends_above_the_first_row_that_disagrees():
    tree = TreeTemplate(((0, 0), (1, 0), (2, 0)))
    draft = [[5, 6, 4]]
    accepted = walk_all([[5, 6, 4, 3]], draft, tree=tree)
    assert accepted.token_ids.tolist() == [[5, 6, 4, 3]]
    disagreeing = walk_all([[5, 2, 4, 3]], draft, tree=tree)
    assert disagreeing.path.tolist() == [[0, 1, -1, -1]]
    assert disagreeing.token_ids.tolist() == [[5, 2, -1, -1]]


def test_a_node_without_draft_ends_the_walk_although_its_child_agrees():
    tree = TreeTemplate(((0, 0), (1, 0), (0, 1)))
    sampled = [[5, 6, 4, 3]]
    filled = walk_all(sampled, [[5, 6, 1]], tree=tree)
    assert filled.path.tolist() == [[0, 1, 2]]
    unfilled = walk_all(sampled, [[-1, 6, -1]], tree=tree)
    assert unfilled.path.tolist() == [[0, -1, -1]]
