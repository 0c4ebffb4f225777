"""Learning in Triton does what its reference does, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_recycle.kernels.triton.learning import top_k

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")

# The most probable tokens.


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(1, 1, 1), (3, 9, 8), (2, 90, 3), (2, 257, 16), (1, 64, 64)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    values=st.integers(1, 40),
)
def test_top_k_has_of_equal_logits_the_lower_token_first(seed, shape, dtype, values):
    num_rows, vocab_size, k = shape
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-values, values, (num_rows, vocab_size), generator=generator)
    logits = logits.to(DEVICE, dtype)
    best = top_k(logits, k)
    assert best.dtype == torch.int32
    assert best.equal(logits.sort(dim=1, descending=True, stable=True).indices[:, :k].int())


def test_top_k_takes_nan_for_the_least_and_reads_logits_of_any_strides():
    logits = torch.tensor([[NAN, 1.0, INF, -INF, 1.0], [-INF, NAN, -INF, NAN, 0.0]], device=DEVICE)
    padded = torch.full((2, 40), INF, device=DEVICE)
    padded[:, :5] = logits
    for view in (logits, padded[:, :5], logits.T.contiguous().T):
        assert top_k(view, 4).tolist() == [[2, 1, 4, 0], [4, 0, 1, 2]]
