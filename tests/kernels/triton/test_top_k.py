"""The most probable tokens in Triton are those of a stable sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_recycle.kernels.triton.top_k import top_k

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 90
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN, INF = float("nan"), float("inf")


def in_order(logits: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [n, k], the top k; of equal logits the lowest id first."""
    return logits.float().sort(dim=1, descending=True, stable=True).indices[:, :k].int()


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(
        [(1, 1, 1), (3, 9, 8), (2, 90, 3), (2, 257, 16), (1, 64, 64), (1, 5, 5), (2, 500, 7)]
    ),
    dtype=st.sampled_from(DTYPES),
    values=st.integers(1, 40),
    layout=st.sampled_from(["rows", "columns", "part"]),
)
def test_top_k_has_of_equal_logits_the_lower_token_first(seed, shape, dtype, values, layout):
    num_rows, vocab_size, k = shape
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-values, values, (num_rows, vocab_size), generator=generator)
    logits = logits.to(DEVICE, dtype)
    expected = in_order(logits, k)
    if layout == "columns":
        logits = logits.T.contiguous().T
    elif layout == "part":
        logits = torch.cat([logits, torch.full_like(logits, INF)], dim=1)[:, :vocab_size]
    best = top_k(logits, k)
    assert best.dtype == torch.int32
    assert best.equal(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_vocabulary_of_few_values_gives_the_lowest_ids(dtype):
    vocab_size = 20_011  # three chunks, and no multiple of anything
    generator = torch.Generator().manual_seed(0)
    # Rounded in the half types, so that the greatest come several times.
    logits = torch.randn(2, vocab_size, generator=generator).to(DEVICE, dtype)
    top = logits[:, [11, 8191, 8192, 20_010]]
    logits[:, [11, 8191, 8192, 20_010]] = top.abs() + 4
    assert top_k(logits, 8).equal(in_order(logits, 8))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({70: -5.0}, [70, 0, 1, 2]),
        ({2: 3.0, 60: INF, 3: 2.0, 89: NAN, 0: NAN}, [60, 2, 3, 0]),
        (dict.fromkeys(range(VOCAB), NAN), [0, 1, 2, 3]),
        ({**dict.fromkeys(range(VOCAB), NAN), 40: -1.0, 88: -1e30}, [40, 88, 0, 1]),
        # A zero and its negative are equal.
        ({5: -0.0, 17: 0.0, 30: -0.0, 31: 0.0, 80: 0.0}, [5, 17, 30, 31]),
    ],
    ids=["all -inf", "all but one -inf", "nan and inf", "all nan", "all but two nan", "zeros"],
)
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of NumPy, in Triton's interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_logit_breaks_the_order(values, expected, dtype):
    logits = torch.full((1, VOCAB), -INF, dtype=dtype, device=DEVICE)
    for token, value in values.items():
        logits[0, token] = value
    assert top_k(logits, 4).tolist() == [expected]
