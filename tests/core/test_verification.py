"""The walk: against a plain loop, and against going down one level at a time."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import THOROUGH, batch_trees, drafts, repetitive_drafts, samples, trees

from vllm_recycle.core.tree import Trees, TreeTemplate
from vllm_recycle.core.verification import WalkResult, step_down, walk

VOCAB = 7


Step = tuple[list[TreeTemplate], list[list[int]], list[list[int]]]


@st.composite
def steps_of_many_trees(draw) -> Step:
    """The trees of one to three sequences, their drafts, and the tokens at the scheduled rows."""
    templates = [draw(trees(max_nodes=15)) for _ in range(draw(st.integers(1, 3)))]
    drafted, sampled = [], []
    for tree in templates:
        kind = draw(st.sampled_from([drafts(tree, vocab_size=VOCAB), repetitive_drafts(tree)]))
        drafted.append(draw(kind))
        at_rows = draw(samples(tree, drafted[-1], vocab_size=VOCAB))
        at_rows = of_texts(tree, drafted[-1], at_rows)
        sampled.append(at_rows[: draw(st.integers(1, len(at_rows)))])
    return templates, drafted, sampled


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


def trees_for(tree: TreeTemplate | Trees, batch: int) -> Trees:
    return tree.of_batch(batch) if isinstance(tree, TreeTemplate) else tree


def walk_all(
    sampled: list[list[int]], drafted: list[list[int]], *, tree: TreeTemplate | Trees
) -> WalkResult:
    """The walk of sequences that may have fewer rows than the tree."""
    starts = torch.tensor([0, *(len(rows) for rows in sampled)]).cumsum(0)
    flat = torch.tensor([token for rows in sampled for token in rows])
    return walk(flat, torch.tensor(drafted), starts, trees=trees_for(tree, len(drafted)))


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
    result, trees = walk_all(sampled, drafted, tree=tree), trees_for(tree, len(drafted))
    reached = torch.zeros(len(drafted), tree.num_nodes + 1, dtype=torch.bool)
    reached[:, 0] = True
    for depth in range(tree.depth + 1):
        there = result.path[:, depth]
        on_path = there >= 0
        assert reached.any(dim=1).equal(on_path)
        assert reached[on_path].gather(1, there[on_path, None]).all()
        token = result.token_ids[:, depth]
        reached = step_down(reached, token, torch.tensor(drafted), trees=trees)
    assert not reached.any()


@THOROUGH
@given(step=steps_of_many_trees())
def test_each_sequence_may_have_a_tree_of_its_own(step):
    templates, drafted, sampled = step
    tree = batch_trees(templates)
    draft = [padded(tokens, tree.num_nodes) for tokens in drafted]
    result = walk_all(sampled, draft, tree=tree)
    assert tree.depth == max(template.depth for template in templates)
    for sequence, tokens in enumerate(sampled):
        path = walk_by_hand(templates[sequence], drafted[sequence], tokens)
        emitted = [tokens[row] for row in path]
        assert result.path[sequence].tolist() == padded(path, tree.depth + 1)
        assert result.token_ids[sequence].tolist() == padded(emitted, tree.depth + 1)
        assert result.lengths[sequence] == len(path)
    # Going down a level at a time reaches the rows whose text the walk emitted.
    scheduled = [padded(tokens[: len(rows) - 1], tree.num_nodes) for tokens, rows in zip_all(step)]
    reached = torch.zeros(len(templates), tree.num_nodes + 1, dtype=torch.bool)
    reached[:, 0] = True
    for depth, token in enumerate(result.token_ids.T):
        for sequence, (tokens, _) in enumerate(zip_all(step)):
            emitted = result.token_ids[sequence, :depth].tolist()
            texts = texts_of(templates[sequence], tokens)[: len(sampled[sequence])]
            rows = [row for row, text in enumerate(texts) if text == emitted and -1 not in text]
            assert reached[sequence].nonzero().flatten().tolist() == rows
        reached = step_down(reached, token, torch.tensor(scheduled), trees=tree)
    assert not reached.any()


def zip_all(step: Step) -> list[tuple[list[int], list[int]]]:
    """Drafts and samples of each sequence."""
    return list(zip(step[1], step[2], strict=True))


def texts_of(tree: TreeTemplate, draft: list[int]) -> list[list[int]]:
    """What each row has from the root down."""
    texts: list[list[int]] = [[]]
    for (parent, _), token in zip(tree.nodes, draft, strict=True):
        texts.append([*texts[parent], token])
    return texts


@THOROUGH
@given(templates=st.lists(trees(max_nodes=20), min_size=1, max_size=3))
def test_trees_of_a_batch_are_those_of_the_templates(templates):
    tree = batch_trees(templates)
    for sequence, template in enumerate(templates):
        rows = template.num_nodes + 1
        assert tree.parents[sequence, :rows].equal(template.parents)
        assert tree.depths[sequence, :rows].equal(template.depths)
        assert tree.ancestor_mask[sequence, :rows, :rows].equal(template.ancestor_mask)
        # Rows behind the last one hang below the root.
        assert (tree.depths[sequence, rows:] == 1).all()
        assert tree.ancestor_mask[sequence, rows:].sum() == 2 * (tree.num_nodes + 1 - rows)
        of_one = template.of_batch(3)
        assert of_one.ancestor_mask.shape == (3, rows, rows)
        assert all(mask.equal(template.ancestor_mask) for mask in of_one.ancestor_mask)


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
