"""The walk in Triton gives what the core gives, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.strategies import batch_trees, drafts, repetitive_drafts, samples, trees
from tests.kernels.triton.grown_trees import on_device
from vllm_recycle.core import verification
from vllm_recycle.core.tree import Trees, TreeTemplate
from vllm_recycle.kernels.triton.walk import walk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def ragged_steps(draw) -> tuple[list[torch.Tensor], Trees]:
    """Trees of one to four requests, the drafts of all nodes, and tokens of a prefix of rows.

    The drafts of siblings may be equal.
    """
    templates, drafted, sampled = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        tree = draw(trees(max_nodes=30))
        templates.append(tree)
        drafted.append(draw(drafts(tree, vocab_size=7) | repetitive_drafts(tree)))
        tokens = draw(samples(tree, drafted[-1], vocab_size=7))
        sampled.append(tokens[: draw(st.integers(1, tree.num_nodes + 1) | st.just(len(tokens)))])
    trees_of_batch = batch_trees(templates)
    nodes = trees_of_batch.num_nodes
    # Behind the last row lie tokens that belong to nobody.
    flat = torch.tensor([token for tokens in sampled for token in tokens] + [0] * nodes)
    padded = torch.tensor([[*tokens, *[-1] * nodes][:nodes] for tokens in drafted])
    starts = torch.tensor([0, *map(len, sampled)]).cumsum(0)
    return [flat, padded, starts], trees_of_batch


@settings(max_examples=100, deadline=None)
@given(
    step=ragged_steps(),
    index_type=st.sampled_from([torch.int32, torch.int64]),
    deeper=st.none() | st.integers(0, 5),
)
def test_walk_equals_torch(step, index_type, deeper):
    """Where drafts and trees are those of the batch, and where they are those of all requests."""
    (flat, padded, starts), trees = step
    batch, nodes = padded.shape
    starts = starts.to(index_type)
    expected = verification.walk(flat, padded, starts, trees=trees)
    flat, padded, starts = (one.to(DEVICE) for one in (flat, padded, starts))
    if deeper is None:
        tables = (trees.parents, trees.depths, trees.ancestor_mask)
        of_batch = Trees(*(table.to(DEVICE) for table in tables), trees.depth)
        got = walk(flat, padded, starts, trees=of_batch)
    else:
        idx_mapping = [*range(batch - 1, -1, -1)]
        placed = on_device(trees, idx_mapping, batch + 1, depth=trees.depth + deeper)
        by_state = torch.full((batch + 1, nodes), 3, device=DEVICE)
        by_state[idx_mapping] = padded
        whose = torch.tensor(idx_mapping, device=DEVICE).to(index_type)
        got = walk(flat, by_state, starts, trees=placed, idx_mapping=whose)
    assert got.lengths.dtype == expected.lengths.dtype
    assert got.lengths.tolist() == expected.lengths.tolist()
    for name in ("path", "token_ids"):
        right = torch.nn.functional.pad(getattr(expected, name), (0, deeper or 0), value=-1)
        assert getattr(got, name).cpu().equal(right), name


@pytest.mark.parametrize("depth", [1, 40, 256])
def test_a_chain_of_any_depth_is_walked(depth):
    tree = TreeTemplate(tuple((row, 0) for row in range(depth))).to(DEVICE)
    tokens = torch.arange(depth + 1, device=DEVICE)
    starts = torch.tensor([0, depth + 1], device=DEVICE)
    result = walk(tokens, tokens[None, :-1], starts, trees=tree.of_batch(1))
    assert result.path.tolist() == result.token_ids.tolist() == [tokens.tolist()]
    assert result.lengths.tolist() == [depth + 1]
