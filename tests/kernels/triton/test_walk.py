"""The walk in Triton gives what the core gives, bit for bit."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from grown_trees import batch_of
from grown_trees import on_device as place_trees
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import drafts, samples, trees

from vllm_recycle.core import verification
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.kernels.triton.walk import walk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(*lists: list) -> list[torch.Tensor]:
    return [torch.tensor(values, device=DEVICE) for values in lists]


@st.composite
def ragged_steps(draw):
    """A tree; of one to four requests the drafts of all nodes, and tokens of a prefix of rows."""
    tree = draw(trees(max_nodes=30))
    drafted, sampled = [], []
    for _ in range(draw(st.integers(1, 4))):
        drafted.append(draw(drafts(tree, vocab_size=7)))
        tokens = draw(samples(tree, drafted[-1], vocab_size=7))
        sampled.append(tokens[: draw(st.integers(1, tree.num_nodes + 1) | st.just(len(tokens)))])
    return tree, drafted, sampled


@settings(max_examples=100, deadline=None)
@given(step=ragged_steps(), starts_type=st.sampled_from([torch.int32, torch.int64]))
def test_walk_equals_torch(step, starts_type):
    tree, drafted, sampled = step
    tree = tree.to(DEVICE)
    # Behind the last row lie tokens that belong to nobody.
    flat = [token for tokens in sampled for token in tokens] + [0] * tree.num_nodes
    starts = torch.tensor([0, *map(len, sampled)], device=DEVICE).cumsum(0).to(starts_type)
    arguments = (*on_device(flat, drafted), starts)
    trees = tree.of_batch(len(drafted))
    expected, got = (one(*arguments, trees=trees) for one in (verification.walk, walk))
    for name in ("path", "token_ids", "lengths"):
        assert getattr(got, name).dtype == getattr(expected, name).dtype
        assert getattr(got, name).equal(getattr(expected, name)), name


def test_the_walk_ends_where_the_scheduled_rows_end_although_drafts_go_on():
    tree = TreeTemplate(((0, 0), (1, 0), (2, 0))).to(DEVICE)
    # The rows of a second sequence follow at once, and agree with the first one's drafts.
    sampled, drafted = on_device([5, 6, 7, 8], [[5, 6, 7], [1, 8, 1]])
    result = walk(sampled, drafted, *on_device([0, 2, 4]), trees=tree.of_batch(2))
    assert result.path.tolist() == [[0, 1, -1, -1], [0, -1, -1, -1]]
    assert result.token_ids.tolist() == [[5, 6, -1, -1], [7, -1, -1, -1]]
    assert result.lengths.tolist() == [2, 1]


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(ragged_steps(), min_size=1, max_size=2),
    idx_type=st.sampled_from([torch.int32, torch.int64]),
    deeper=st.integers(0, 5),
)
def test_walk_of_a_tree_for_each_request_equals_torch(steps, idx_type, deeper):
    templates = [tree for tree, drafted, _ in steps for _ in drafted]
    trees = batch_of(templates, max(tree.num_nodes for tree in templates))
    nodes, batch = trees.num_nodes, len(templates)
    drafted = [[*tokens, *[-1] * nodes][:nodes] for _, several, _ in steps for tokens in several]
    sampled = [tokens for _, _, several in steps for tokens in several]
    flat = [token for tokens in sampled for token in tokens]
    arguments = on_device(flat, drafted, [0, *accumulate(map(len, sampled))])
    expected = verification.walk(*arguments, trees=trees)
    idx_mapping = [*range(batch - 1, -1, -1)]
    placed = place_trees(trees, idx_mapping, batch + 1, DEVICE, depth=trees.depth + deeper)
    sampled, drafted, starts = arguments
    by_state = torch.full((batch + 1, nodes), 3, device=DEVICE)
    by_state[idx_mapping] = drafted
    whose = torch.tensor(idx_mapping, device=DEVICE).to(idx_type)
    got = walk(sampled, by_state, starts, trees=placed, idx_mapping=whose)
    assert got.lengths.equal(expected.lengths)
    for name in ("path", "token_ids"):
        padded = torch.nn.functional.pad(getattr(expected, name), (0, deeper), value=-1)
        assert getattr(got, name).equal(padded), name


@pytest.mark.parametrize("depth", [1, 40, 256])
def test_a_chain_of_any_depth_is_walked(depth):
    tree = TreeTemplate(tuple((row, 0) for row in range(depth))).to(DEVICE)
    tokens = list(range(depth + 1))
    sampled, drafted = on_device(tokens, [tokens[:-1]])
    result = walk(sampled, drafted, *on_device([0, depth + 1]), trees=tree.of_batch(1))
    assert result.path.tolist() == result.token_ids.tolist() == [tokens]
    assert result.lengths.tolist() == [depth + 1]
