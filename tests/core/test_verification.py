"""The walk: against a plain loop, and against going down one level at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import THOROUGH, batch_trees, drafts, repetitive_drafts, samples, trees
from vllm_recycle.core.tree import Trees, TreeTemplate
from vllm_recycle.core.verification import WalkResult, step_down, walk

VOCAB = 7


Step = tuple[list[TreeTemplate], list[list[int]], list[list[int]]]


@st.composite
def steps(draw) -> Step:
    """The trees of one to three sequences, their drafts, and the tokens at the scheduled rows."""
    templates = [draw(trees(max_nodes=20)) for _ in range(draw(st.integers(1, 3)))]
    drafted, sampled = [], []
    for tree in templates:
        kind = draw(st.sampled_from([drafts(tree, vocab_size=VOCAB), repetitive_drafts(tree)]))
        drafted.append(draw(kind))
        at_rows = draw(samples(tree, drafted[-1], vocab_size=VOCAB))
        # Rows of the same text agree: equal siblings make such.
        texts, token_of = texts_of(tree, drafted[-1]), {}
        at_rows = [
            token_of.setdefault(text, token) for text, token in zip(texts, at_rows, strict=True)
        ]
        sampled.append(at_rows[: draw(st.integers(1, len(at_rows)))])
    return templates, drafted, sampled


def texts_of(tree: TreeTemplate, draft: list[int]) -> list[tuple[int, ...]]:
    """The drafts from the root down to each row."""
    texts: list[tuple[int, ...]] = [()]
    for (parent, _), token in zip(tree.nodes, draft, strict=True):
        texts.append((*texts[parent], token))
    return texts


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


def walk_all(sampled: list[list[int]], drafted: list[list[int]], trees: Trees) -> WalkResult:
    """The walk of sequences that may have fewer rows than the tree."""
    starts = torch.tensor([0, *(len(rows) for rows in sampled)]).cumsum(0)
    flat = torch.tensor([token for rows in sampled for token in rows])
    return walk(flat, torch.tensor(drafted), starts, trees=trees)


def padded(values: list[int], width: int) -> list[int]:
    return [*values, *[-1] * (width - len(values))]


@THOROUGH
@given(step=steps())
def test_the_walk_follows_the_drafts_as_a_plain_loop_does(step):
    templates, drafted, sampled = step
    tree = batch_trees(templates)
    result = walk_all(sampled, [padded(draft, tree.num_nodes) for draft in drafted], tree)
    for sequence, tokens in enumerate(sampled):
        path = walk_by_hand(templates[sequence], drafted[sequence], tokens)
        emitted = [tokens[row] for row in path]
        assert result.path[sequence].tolist() == padded(path, tree.depth + 1)
        assert result.token_ids[sequence].tolist() == padded(emitted, tree.depth + 1)
        assert result.lengths[sequence] == len(path)


@THOROUGH
@given(step=steps())
def test_going_down_a_level_at_a_time_reaches_the_rows_whose_text_was_emitted(step):
    templates, drafted, sampled = step
    tree = batch_trees(templates)
    scheduled = [
        padded(draft[: len(rows) - 1], tree.num_nodes)
        for draft, rows in zip(drafted, sampled, strict=True)
    ]
    result = walk_all(sampled, scheduled, tree)
    reached = torch.zeros(len(templates), tree.num_nodes + 1, dtype=torch.bool)
    reached[:, 0] = True
    for depth, token in enumerate(result.token_ids.T):
        for sequence, template in enumerate(templates):
            emitted = tuple(result.token_ids[sequence, :depth].tolist())
            texts = texts_of(template, drafted[sequence])[: len(sampled[sequence])]
            rows = [row for row, text in enumerate(texts) if text == emitted and -1 not in text]
            assert reached[sequence].nonzero().flatten().tolist() == rows
        reached = step_down(reached, token, torch.tensor(scheduled), trees=tree)
    assert not reached.any()


def test_the_walk_ends_above_the_first_row_that_disagrees():
    trees = TreeTemplate(((0, 0), (1, 0), (2, 0))).of_batch(1)
    accepted = walk_all([[5, 6, 4, 3]], [[5, 6, 4]], trees)
    assert accepted.token_ids.tolist() == [[5, 6, 4, 3]]
    disagreeing = walk_all([[5, 2, 4, 3]], [[5, 6, 4]], trees)
    assert disagreeing.path.tolist() == [[0, 1, -1, -1]]
    assert disagreeing.token_ids.tolist() == [[5, 2, -1, -1]]


def test_a_node_without_draft_ends_the_walk_although_its_child_agrees():
    trees = TreeTemplate(((0, 0), (1, 0), (0, 1))).of_batch(1)
    for draft, path in (([5, 6, 1], [0, 1, 2]), ([-1, 6, -1], [0, -1, -1])):
        assert walk_all([[5, 6, 4, 3]], [draft], trees).path.tolist() == [path]
