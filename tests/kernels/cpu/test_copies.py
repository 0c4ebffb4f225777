"""Copies in C++ are those of the reference, bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_recycle.core import reference
from vllm_recycle.core.adjacency import NUM_CLASSES, Ends
from vllm_recycle.core.copies import Copies
from vllm_recycle.kernels.cpu import calls

BATCH = 3


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kinds=st.sampled_from([1, 2, 4, 30]),
    has_holes=st.booleans(),
    has_hints=st.booleans(),
    counts=st.booleans(),
)
def test_copies_equal_the_reference(seed, kinds, has_holes, has_hints, counts):
    torch.manual_seed(seed)
    width, classes = 300, torch.randint(NUM_CLASSES, (BATCH + 2,))
    token_ids = torch.randint(kinds, (BATCH, width), dtype=torch.int32)
    token_ids[:, 100:200] = token_ids[:, :100]  # longer matches than chance gives
    is_token = torch.rand(BATCH, width) < 0.97 if has_holes else None
    idx_mapping = torch.randperm(BATCH + 2)[:BATCH]
    states = [Copies(classes, 20, counts=counts) for _ in range(2)]
    for state in states:
        state.acceptance.counts[:, :, 5] = 1999.0  # soon halved
        for index in idx_mapping.tolist():
            state.begin(index, token_ids[0, 30:90].tolist() if has_hints and index % 2 else ())
    last_positions = torch.randint(-1, 190, (BATCH,)).tolist()
    for _ in range(12):
        ends = Ends(token_ids, last_positions, is_token)
        trunks = [
            operations.draft_copies(state, idx_mapping, ends)
            for operations, state in zip((reference, calls), states, strict=True)
        ]
        assert trunks[0].token_ids.equal(trunks[1].token_ids)
        assert trunks[0].chances.equal(trunks[1].chances)
        follows = torch.full((BATCH, 7), -1)
        for b, last in enumerate(last_positions):
            size = int(torch.randint(1, 8, ())) if 0 <= last < width - 8 else 0
            follows[b, :size] = token_ids[b, last + 1 : last + 1 + size]
            last_positions[b] += size
        reference.learn_copies(states[0], idx_mapping, ends, follows)
        calls.learn_copies(states[1], idx_mapping, ends, follows)
        for name in ("stands", "places"):
            assert getattr(states[0], name).equal(getattr(states[1], name))
        assert states[0].acceptance.counts.equal(states[1].acceptance.counts)
