"""How far the output of attention may be from another's that computes the same."""

from __future__ import annotations

import torch

# Outputs are averages of standard normal values, hence below 4 in magnitude: a rounding is off by
# 2^-7 or 2^-10 at most, and results differ by a few (of outputs, and of weights before the sum). In
# float32 sums over some hundred terms are what differs, by several times 2^-22.
TOLERANCE = {torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float32: 2**-18}


def largest_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference.double()).abs().max())


def is_within_tolerance(output: torch.Tensor, reference: torch.Tensor) -> bool:
    return largest_error(output, reference) <= TOLERANCE[output.dtype]
