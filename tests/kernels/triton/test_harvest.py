"""The kernel of the harvest gives what the torch function gives that it is the twin of."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_recycle.core.draft_shape import DraftShape
from vllm_recycle.core.harvest import harvest as reference
from vllm_recycle.kernels.triton.ouroboros.harvest import harvest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=60, deadline=None)
@given(
    gamma=st.integers(1, 9),
    branches=st.integers(0, 3),
    length=st.integers(3, 6),
    seed=st.integers(0, 2**16),
    batch=st.integers(1, 3),
)
def test_any_rows_give_the_same_phrases(gamma, branches, length, seed, batch):
    shape = DraftShape(gamma, 1, 1, length, branches)
    generator = torch.Generator().manual_seed(seed)
    # Few tokens, so that draft and target agree often; drafts end anywhere, and may have gaps.
    sizes = torch.randint(1, shape.num_nodes + 2, (batch,), generator=generator)
    sizes[0] = shape.num_nodes + 1
    cu_num_logits = torch.tensor([0, *sizes]).cumsum(0).int()
    rows = int(cu_num_logits[-1])
    drafts = torch.randint(0, 2, (rows,), generator=generator)
    drafts = drafts.where(torch.rand(rows, generator=generator) > 0.03, -1)
    sampled = torch.randint(0, 2, (rows,), generator=generator)
    given_rows = [tensor.to(DEVICE) for tensor in (drafts, sampled, cu_num_logits)]
    results = reference(*given_rows, shape=shape), harvest(*given_rows, shape=shape)
    for expected, got in zip(*results, strict=True):
        for name in ("owners", "phrases", "replaced"):
            one, other = getattr(expected, name), getattr(got, name)
            assert type(one) is type(other)
            assert one is None or (other.dtype == one.dtype and other.equal(one)), name
