"""The inputs of a step's trees in Triton are those of its torch twin."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.strategies import batch_trees, trees
from tests.kernels.triton import torch_twins
from tests.kernels.triton.grown_trees import on_device
from vllm_recycle.kernels.triton import inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=40, deadline=None)
@given(
    templates=st.lists(trees(max_nodes=30), min_size=3, max_size=3),
    num_tokens=st.integers(1, 300),
    part=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
def test_rows_are_placed_as_the_twin_places_them(templates, num_tokens, part, seed):
    """Of the tokens of a step some are rows of trees, in any order."""
    torch.manual_seed(seed)
    rows = torch.randperm(num_tokens)[: int(part * num_tokens)]
    whose = torch.arange(len(rows)) % 3
    nodes = torch.tensor([template.num_nodes for template in templates])[whose]
    places = (torch.rand(len(rows)) * (nodes + 1)).int()
    tensors = [torch.randint(-1, 6, (num_tokens,)).int(), 1000 + 3 * torch.arange(num_tokens)]
    of_step = {
        "trees": on_device(batch_trees(templates), [0, 1, 2], 3),
        "idx_mapping": whose[:3].to(DEVICE, torch.int32),
        "expanded_idx_mapping": whose.to(DEVICE),
    }
    found = []
    for place in (torch_twins.place_tree_rows, inputs.place_tree_rows):
        changed = [one.clone().to(DEVICE) for one in (*tensors, torch.full((8,), 99))]
        at = (rows.to(DEVICE), places.to(DEVICE))
        row_token_ids = place(*changed[:2], *at, **of_step, tree_indices=changed[2])
        found.append([row_token_ids, *changed])
    for expected, got in zip(*found, strict=True):
        assert got.dtype == expected.dtype
        assert got.equal(expected)
