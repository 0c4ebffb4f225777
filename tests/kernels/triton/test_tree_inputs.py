"""The inputs of a step's trees: what a plain loop makes of them, in torch and in Triton."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.strategies import batch_trees, trees
from tests.kernels.triton import torch_twins
from tests.kernels.triton.grown_trees import on_device
from vllm_recycle.kernels.triton import inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUNCTIONS = [torch_twins.place_tree_rows, inputs.place_tree_rows]


either = pytest.mark.parametrize("place_tree_rows", FUNCTIONS, ids=["torch", "triton"])


@st.composite
def steps(draw):
    """Trees, the tokens of a step, which of them are rows of trees, in any order, and where."""
    templates = [draw(trees(max_nodes=30)) for _ in range(3)]
    num_tokens = draw(st.integers(1, 300))
    token_ids = draw(st.lists(st.integers(-1, 5), min_size=num_tokens, max_size=num_tokens))
    logits_indices = draw(st.permutations(range(num_tokens)))[: draw(st.integers(0, num_tokens))]
    whose = [row % 3 for row in range(len(logits_indices))]
    places = [draw(st.integers(0, templates[b].num_nodes)) for b in whose]
    return templates, token_ids, logits_indices, whose, places


@either
@settings(max_examples=40, deadline=None)
@given(step=steps())
def test_rows_are_placed_as_a_plain_loop_places_them(place_tree_rows, step):
    templates, token_ids, logits_indices, whose, places = step
    positions = [1000 + 3 * row for row in range(len(token_ids))]
    input_ids = torch.tensor(token_ids, dtype=torch.int32, device=DEVICE)
    changed = torch.tensor(positions, device=DEVICE)
    rows = torch.tensor(logits_indices, dtype=torch.int64, device=DEVICE)
    tree_rows = torch.tensor(places, dtype=torch.int32, device=DEVICE)
    states = [*dict.fromkeys(whose)]
    tree_indices = torch.full((8,), 99, device=DEVICE)
    row_token_ids = place_tree_rows(
        input_ids,
        changed,
        rows,
        tree_rows,
        trees=on_device(batch_trees(templates), [0, 1, 2], 3, DEVICE),
        idx_mapping=torch.tensor(states, dtype=torch.int32, device=DEVICE),
        expanded_idx_mapping=torch.tensor(whose, dtype=torch.int64, device=DEVICE),
        tree_indices=tree_indices,
    )
    assert tree_indices.tolist() == [*states, *[99] * 8][:8]
    assert row_token_ids.dtype == torch.int64
    assert row_token_ids.tolist() == [token_ids[row] for row in logits_indices]
    for token_row, b, tree_row in zip(logits_indices, whose, places, strict=True):
        token_ids[token_row] = max(token_ids[token_row], 0)
        positions[token_row] += int(templates[b].depths[tree_row]) - tree_row
    assert input_ids.tolist() == token_ids
    assert changed.tolist() == positions
