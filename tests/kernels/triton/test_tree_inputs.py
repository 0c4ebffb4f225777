"""The inputs of a step's trees: what a plain loop makes of them, in torch and in Triton."""

from __future__ import annotations

import pytest
import torch
import torch_twins
from grown_trees import batch_of, on_device
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import trees

from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.kernels.triton import inputs
from vllm_recycle.kernels.triton.trees import DeviceTrees

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUNCTIONS = [torch_twins.place_tree_rows, inputs.place_tree_rows]


def place(place_tree_rows, step: list[torch.Tensor], trees: DeviceTrees, whose: list[int]):
    """The tokens of rows of some requests; each request is told once."""
    expanded = torch.tensor(whose, dtype=torch.int64, device=DEVICE)
    idx_mapping = torch.tensor(list(dict.fromkeys(whose)), dtype=torch.int32, device=DEVICE)
    tree_indices = torch.full((8,), 99, device=DEVICE)
    row_token_ids = place_tree_rows(
        *step,
        trees=trees,
        idx_mapping=idx_mapping,
        expanded_idx_mapping=expanded,
        tree_indices=tree_indices,
    )
    assert tree_indices.tolist() == [*idx_mapping.tolist(), *[99] * 8][:8]
    return row_token_ids


either = pytest.mark.parametrize("place_tree_rows", FUNCTIONS, ids=["torch", "triton"])


@st.composite
def steps(draw):
    """A tree, the tokens of a step, and which of them are rows of trees, in any order."""
    tree = draw(trees(max_nodes=30))
    num_tokens = draw(st.integers(1, 300))
    token_ids = draw(st.lists(st.integers(-1, 5), min_size=num_tokens, max_size=num_tokens))
    logits_indices = draw(st.permutations(range(num_tokens)))[: draw(st.integers(0, num_tokens))]
    tree_row = st.integers(0, tree.num_nodes)
    expanded_local_pos = draw(
        st.lists(tree_row, min_size=len(logits_indices), max_size=len(logits_indices))
    )
    return tree, token_ids, logits_indices, expanded_local_pos


@either
@settings(max_examples=40, deadline=None)
@given(step=steps())
def test_rows_are_placed_as_a_plain_loop_places_them(place_tree_rows, step):
    tree, token_ids, logits_indices, expanded_local_pos = step
    positions = [1000 + 3 * row for row in range(len(token_ids))]
    input_ids = torch.tensor(token_ids, dtype=torch.int32, device=DEVICE)
    changed = torch.tensor(positions, device=DEVICE)
    rows = torch.tensor(logits_indices, dtype=torch.int64, device=DEVICE)
    tree_rows = torch.tensor(expanded_local_pos, dtype=torch.int32, device=DEVICE)
    trees, whose = DeviceTrees.of(tree, 3, DEVICE), [row % 3 for row in range(len(logits_indices))]
    row_token_ids = place(place_tree_rows, [input_ids, changed, rows, tree_rows], trees, whose)
    assert row_token_ids.dtype == torch.int64
    assert row_token_ids.tolist() == [token_ids[row] for row in logits_indices]
    for token_row, tree_row in zip(logits_indices, expanded_local_pos, strict=True):
        token_ids[token_row] = max(token_ids[token_row], 0)
        positions[token_row] += int(tree.depths[tree_row]) - tree_row
    assert input_ids.tolist() == token_ids
    assert changed.tolist() == positions


@either
def test_each_request_has_the_depths_of_its_own_tree(place_tree_rows):
    chain, star = TreeTemplate(((0, 0), (1, 0), (2, 0))), TreeTemplate(((0, 0), (0, 1), (0, 2)))
    placed = on_device(batch_of([chain, star], 3), [2, 0], 3, DEVICE)
    input_ids = torch.tensor([5, 6, 7, 8, 9, 4, 3], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([50, 51, 52, 70, 71, 72, 73], device=DEVICE)
    tree_rows = torch.tensor([0, 1, 2, 0, 1, 2, 3], dtype=torch.int32, device=DEVICE)
    step = [input_ids, positions, torch.arange(7, device=DEVICE), tree_rows]
    place(place_tree_rows, step, placed, [2, 2, 2, 0, 0, 0, 0])
    assert positions.tolist() == [50, 51, 52, 70, 71, 71, 71]


@either
def test_a_tree_behind_a_prompt_lies_at_the_positions_of_its_depths(place_tree_rows):
    trees = DeviceTrees.of(TreeTemplate(((0, 0), (0, 1), (1, 0))), 2, DEVICE)
    # Two tokens of a prompt, then a sequence of 100 tokens with a tree.
    input_ids = torch.tensor([8, 9, 5, 6, -1, 7], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([40, 41, 99, 100, 101, 102], device=DEVICE)
    logits_indices = torch.tensor([1, 2, 3, 4, 5], device=DEVICE)
    expanded_local_pos = torch.tensor([0, 0, 1, 2, 3], dtype=torch.int32, device=DEVICE)
    step = [input_ids, positions, logits_indices, expanded_local_pos]
    row_token_ids = place(place_tree_rows, step, trees, [1, 0, 0, 0, 0])
    assert row_token_ids.tolist() == [9, 5, 6, -1, 7]
    assert input_ids.tolist() == [8, 9, 5, 6, 0, 7]
    assert positions.tolist() == [40, 41, 99, 100, 100, 101]
