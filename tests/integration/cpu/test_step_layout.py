"""Which rows of a step are moved, so that an accepted path lies behind its root."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.core.strategies import paths_of
from vllm_recycle.core.tree import load_tree
from vllm_recycle.integration.cpu.step_layout import StepLayout

TREE = load_tree("paper-80").prefix(30)
PATHS = paths_of(TREE)


def test_a_path_that_lies_at_the_front_moves_nothing():
    # Two requests with a draft, and between them one with two tokens of a prompt.
    trees = StepLayout.make(
        trees=TREE.of_batch(3),
        num_nodes=[3, 0, 10],
        last_token_row=[3, 5, 16],
        row_token_ids=np.array([5, 1, 2, 3, 8, 5, *range(10)]),
    )
    # Nodes 1 and 9 are the first child of the root and its first child.
    for ends, moves in (([1, 0, 1], []), ([2, 0, 9], [(2, 1), (6 + 9, 6 + 2)])):
        paths = [torch.tensor(PATHS[end]) for end in ends]
        assert trees.moves(pad_sequence(paths, batch_first=True, padding_value=-1)) == moves
