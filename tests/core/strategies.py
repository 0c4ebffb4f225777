"""Hypothesis strategies for the core: arbitrary valid trees, and drafts and samples for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import settings
from hypothesis import strategies as st

from vllm_recycle.core.tree import MAX_NODES, Trees, TreeTemplate

K = 4
# Each node below one of the eight before it: deep, and wide.
LARGEST = TreeTemplate(tuple((max(0, node - node * 5 % 8), node % 8) for node in range(MAX_NODES)))

# No deadline: the first example pays for lazy imports, and test machines are shared.
THOROUGH = settings(max_examples=80, deadline=None)
BRIEF = settings(max_examples=30, deadline=None)


@st.composite
def trees(draw, *, max_nodes=40, k=K) -> TreeTemplate:
    """Any tree with at most `max_nodes` nodes and ranks below `k`, from a chain to a bush."""
    size = draw(st.integers(1, max_nodes))
    # How far back a parent may lie: with 1 the tree is a chain.
    reach = draw(st.integers(1, max_nodes))
    node = st.tuples(st.integers(0, reach - 1), st.integers(0, k - 1))
    nodes: dict[tuple[int, int], None] = {}
    for back, rank in draw(st.lists(node, min_size=size, max_size=size)):
        nodes.setdefault((max(0, len(nodes) - back), rank))
    return TreeTemplate(tuple(nodes))


def paths_of(tree: TreeTemplate) -> list[list[int]]:
    """The rows from the root down to each row."""
    paths = [[0]]
    for row, (parent, _) in enumerate(tree.nodes, start=1):
        paths.append([*paths[parent], row])
    return paths


def batch_trees(templates: Sequence[TreeTemplate]) -> Trees:
    """Each of these trees for one request; rows behind the last one of a tree have parent 0."""
    rows = [template.parents for template in templates]
    return Trees.from_parents(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))


@st.composite
def drafts(draw, tree: TreeTemplate, *, vocab_size: int) -> list[int]:
    """Draft tokens of a tree: siblings differ, and some nodes are -1."""
    rows = tree.num_nodes + 1
    first = draw(st.lists(st.integers(0, vocab_size - 1), min_size=rows, max_size=rows))
    filled = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    return [
        (first[parent] + rank) % vocab_size if filled[j] else -1
        for j, (parent, rank) in enumerate(tree.nodes)
    ]


@st.composite
def repetitive_drafts(draw, tree: TreeTemplate) -> list[int]:
    """Draft tokens of a tree of which siblings are often equal."""
    return draw(st.lists(st.integers(-1, 2), min_size=tree.num_nodes, max_size=tree.num_nodes))


@st.composite
def samples(draw, tree: TreeTemplate, draft: list[int], *, vocab_size: int) -> list[int]:
    """A token for each row, more often than not that of one of the row's children."""
    rows = tree.num_nodes + 1
    any_token = draw(st.lists(st.integers(0, vocab_size - 1), min_size=rows, max_size=rows))
    choices = draw(st.lists(st.integers(0, 2 * K), min_size=rows, max_size=rows))
    sampled = []
    for row, choice in enumerate(choices):
        offered = [draft[j] for j, (parent, _) in enumerate(tree.nodes) if parent == row]
        offered = [token for token in offered if token >= 0]
        agree = offered and choice > 0
        sampled.append(offered[choice % len(offered)] if agree else any_token[row])
    return sampled


@st.composite
def seconds_by_rows(draw) -> torch.Tensor:
    """Never falling, of whole numbers: now a row costs much, and now nothing."""
    rises = st.sampled_from([0, 0, 0, 1, 1, 2, 5])
    times = [draw(st.integers(1, 6))]
    for rise in draw(st.lists(rises, min_size=1, max_size=16)):
        times.append(times[-1] + rise)
    return torch.tensor(times, dtype=torch.float64)
