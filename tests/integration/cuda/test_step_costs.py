"""What parameters cost: numbers that are multiplied, and bytes that are read, packed or not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_recycle.core.roofline import Weights
from vllm_recycle.integration.cuda.time_steps import weights_of


@pytest.mark.parametrize(
    ("dtype", "quantization", "count", "num_bytes"),
    [
        (torch.bfloat16, None, 64.0, 128),
        # At twice the rate: half as much to compute.
        (torch.float8_e4m3fn, None, 32.0, 64),
        (torch.int8, None, 32.0, 64),
        # Eight numbers of four bits in each, or four of eight.
        (torch.int32, SimpleNamespace(weight_bits=4), 512.0, 256),
        (torch.int32, SimpleNamespace(weight_bits=8), 256.0, 256),
        (torch.uint8, None, 128.0, 64),
    ],
)
def test_a_parameter_is_counted_as_what_it_holds(dtype, quantization, count, num_bytes):
    parameter = torch.nn.Parameter(torch.zeros(8, 8).to(dtype), requires_grad=False)
    assert weights_of([parameter], quantization) == Weights(count, num_bytes)
    assert weights_of([parameter] * 2, quantization) == Weights(2 * count, 2 * num_bytes)


def test_no_parameters_cost_nothing():
    assert weights_of([], None) == Weights(0.0, 0)
