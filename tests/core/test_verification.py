"""The walk: against a plain loop, and against going down one level at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import THOROUGH, drafts, repetitive_drafts, samples, trees

from vllm_recycle.core import TreeTemplate, WalkResult, step_down, walk

VOCAB = 7


@st.composite
def steps(draw) -> tuple[TreeTemplate, list[list[int]], list[list[int]]]:
    """A tree, the drafts of one to three sequences, and the tokens sampled at all rows."""
    tree = draw(trees(max_nodes=30))
    kind = draw(st.sampled_from([drafts(tree, vocab_size=VOCAB), repetitive_drafts(tree)]))
    drafted = [draw(kind) for _ in range(draw(st.integers(1, 3)))]
    sampled = [draw(samples(tree, draft, vocab_size=VOCAB)) for draft in drafted]
    return tree, drafted, [*map(of_texts, [tree] * len(drafted), drafted, sampled)]


def of_texts(tree: TreeTemplate, draft: list[int], sampled: list[int]) -> list[int]:
    """The samples, with rows of the same text agreeing: equal siblings make such."""
    texts, token_of = [()], {(): sampled[0]}
    for (parent, _), token, found in zip(tree.nodes, draft, sampled[1:], strict=True):
        texts.append((*texts[parent], token))
        token_of.setdefault(texts[-1], found)
    return [token_of[text] for text in texts]


def walk_by_hand(tree: TreeTemplate, draft: list[int], sampled: list[int]) -> list[int]:
    """`sampled` has a token for each row that is scheduled."""
    paths = [[0]]
    for node, (parent, _) in enumerate(tree.nodes[: len(sampled) - 1], start=1):
        paths += [
            [*path, node]
            for path in paths
            if path[-1] == parent and draft[node - 1] == sampled[parent]
        ]
    return max(paths, key=lambda path: (len(path), -path[-1]))


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
def test_stepping_down_reaches_as_deep_as_the_walk(step):
    tree, drafted, sampled = step
    result = walk_all(sampled, drafted, tree=tree)
    reached = torch.zeros(len(drafted), tree.num_nodes + 1, dtype=torch.bool)
    reached[:, 0] = True
    for depth in range(tree.depth + 1):
        there = result.path[:, depth]
        on_path = there >= 0
        assert reached.any(dim=1).equal(on_path)
        assert reached[on_path].gather(1, there[on_path, None]).all()
        token = result.token_ids[:, depth]
        reached = step_down(reached, token, torch.tensor(drafted), tree=tree)
    assert not reached.any()


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
