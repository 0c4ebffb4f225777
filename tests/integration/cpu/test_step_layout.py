"""The row arithmetic of a step, against plain loops over the requests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import paths_of
from torch.nn.utils.rnn import pad_sequence

from vllm_recycle.core.tree import load_tree
from vllm_recycle.integration.cpu.step_layout import StepLayout

TREE = load_tree("paper-80").prefix(30)
PATHS = paths_of(TREE)
# No deadline: the first example pays for lazy imports, and test machines are shared.
THOROUGH = settings(max_examples=80, deadline=None)


@dataclass(frozen=True)
class Request:
    """Scheduled tokens of a request: some of the prompt, or a root and its draft."""

    tokens: list[int]
    num_nodes: int

    @property
    def logit_tokens(self) -> list[int]:
        return self.tokens[len(self.tokens) - 1 - self.num_nodes :]


token_ids = st.integers(0, 99)


@st.composite
def requests(draw) -> Request:
    if draw(st.booleans()):
        return Request(draw(st.lists(token_ids, min_size=1, max_size=20)), 0)
    size = draw(st.integers(0, TREE.num_nodes))
    draft = draw(st.lists(token_ids | st.just(-1), min_size=size, max_size=size))
    return Request([draw(token_ids), *draft], size)


batches = st.lists(requests(), min_size=1, max_size=6)


def make(batch: list[Request]) -> StepLayout:
    ends = accumulate(len(request.tokens) for request in batch)
    return StepLayout.make(
        trees=TREE.of_batch(len(batch)),
        num_nodes=[request.num_nodes for request in batch],
        last_token_row=[end - 1 for end in ends],
        row_token_ids=np.array([token for request in batch for token in request.logit_tokens]),
    )


def paths_to(rows: list[int]) -> torch.Tensor:
    """int64 [n, path], padded with -1."""
    paths = [torch.tensor(PATHS[row]) for row in rows]
    return pad_sequence(paths, batch_first=True, padding_value=-1)


@THOROUGH
@given(batch=batches)
def test_rows_and_drafts_are_where_a_loop_over_the_requests_finds_them(batch):
    trees = make(batch)
    token_row = logit_row = 0
    positions = torch.arange(sum(len(request.tokens) for request in batch))
    expected = positions.tolist()
    for index, request in enumerate(batch):
        size = request.num_nodes
        root = token_row + len(request.tokens) - 1 - size
        unscheduled = TREE.num_nodes - size
        assert trees.num_nodes[index] == size
        assert trees.first_token_row[index] == root
        assert trees.cu_num_logits[index] == logit_row
        assert trees.drafts[index].tolist() == request.logit_tokens[1:] + [-1] * unscheduled
        expected[root : root + size + 1] = [root + len(PATHS[row]) - 1 for row in range(size + 1)]
        token_row += len(request.tokens)
        logit_row += size + 1
    assert trees.cu_num_logits[-1] == logit_row
    input_ids = np.array([token for request in batch for token in request.tokens])
    trees.place([positions], input_ids)
    assert positions.tolist() == expected
    assert input_ids.tolist() == [max(0, t) for request in batch for t in request.tokens]
    assert trees.row_token_ids.tolist() == [
        token for request in batch for token in request.logit_tokens
    ]


@THOROUGH
@given(batch=batches, data=st.data())
def test_moves_bring_the_accepted_rows_to_the_front_and_move_no_other(batch, data):
    trees = make(batch)
    ends = [data.draw(st.integers(0, request.num_nodes)) for request in batch]
    moves = trees.moves(paths_to(ends))
    expected = list(range(sum(len(request.tokens) for request in batch)))
    moved = [*expected]
    for read, write in moves:
        moved[write] = expected[read]
    for root, end in zip(trees.first_token_row, ends, strict=True):
        for place, row in enumerate(PATHS[end]):
            expected[root + place] = root + row
    assert moved == expected
    assert all(read != write for read, write in moves)
    assert len({write for _, write in moves}) == len(moves)


def test_a_path_that_lies_at_the_front_moves_nothing():
    batch = [Request([5, 1, 2, 3], 3), Request([7, 8], 0), Request([5, *range(10)], 10)]
    trees = make(batch)
    # Nodes 1 and 9 are the first child of the root and its first child.
    for ends, moves in (([1, 0, 1], []), ([2, 0, 9], [(2, 1), (6 + 9, 6 + 2)])):
        assert trees.moves(paths_to(ends)) == moves
