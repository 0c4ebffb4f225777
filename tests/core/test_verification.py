"""The walk: against a plain loop, and against going down one level at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import THOROUGH, batch_trees, drafts, repetitive_drafts, samples
from tests.core.strategies import trees as templates_of
from vllm_recycle.core.tree import Trees, TreeTemplate
from vllm_recycle.core.verification import WalkResult, step_down, walk

VOCAB = 7


Step = tuple[list[TreeTemplate], list[list[int]], list[list[int]]]


@st.composite
def steps(draw) -> Step:
    """The trees of one to three sequences, their drafts, and the tokens at the scheduled rows."""
    templates = [draw(templates_of(max_nodes=20)) for _ in range(draw(st.integers(1, 3)))]
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


def padded(values: list[int], width: int) -> list[int]:
    return [*values, *[-1] * (width - len(values))]


def walk_all(step: Step) -> tuple[WalkResult, torch.Tensor, Trees]:
    """The walk of sequences that may have fewer rows than the tree, and what was scheduled."""
    templates, drafted, sampled = step
    trees = batch_trees(templates)
    starts = torch.tensor([0, *map(len, sampled)]).cumsum(0)
    scheduled = [
        padded(draft[: len(rows) - 1], trees.num_nodes)
        for draft, rows in zip(drafted, sampled, strict=True)
    ]
    whole = torch.tensor([padded(draft, trees.num_nodes) for draft in drafted])
    flat = torch.tensor([token for rows in sampled for token in rows])
    return walk(flat, whole, starts, trees=trees), torch.tensor(scheduled), trees


@THOROUGH
@given(step=steps())
def test_the_walk_follows_the_drafts_as_a_plain_loop_does(step):
    result, _, trees = walk_all(step)
    for sequence, (template, draft, tokens) in enumerate(zip(*step, strict=True)):
        path = walk_by_hand(template, draft, tokens)
        emitted = [tokens[row] for row in path]
        assert result.path[sequence].tolist() == padded(path, trees.depth + 1)
        assert result.token_ids[sequence].tolist() == padded(emitted, trees.depth + 1)
        assert result.lengths[sequence] == len(path)


@THOROUGH
@given(step=steps())
def test_going_down_a_level_at_a_time_reaches_the_rows_whose_text_was_emitted(step):
    result, scheduled, trees = walk_all(step)
    reached = torch.zeros(len(scheduled), trees.num_nodes + 1, dtype=torch.bool)
    reached[:, 0] = True
    for depth, token in enumerate(result.token_ids.T):
        for sequence, (template, draft, sampled) in enumerate(zip(*step, strict=True)):
            emitted = tuple(result.token_ids[sequence, :depth].tolist())
            texts = texts_of(template, draft)[: len(sampled)]
            rows = [row for row, text in enumerate(texts) if text == emitted and -1 not in text]
            assert reached[sequence].nonzero().flatten().tolist() == rows
        reached = step_down(reached, token, scheduled, trees=trees)
    assert not reached.any()
