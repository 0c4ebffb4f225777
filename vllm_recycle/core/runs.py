"""Runs of equal values in sorted tensors."""

from __future__ import annotations

import torch


def run_starts(values: torch.Tensor) -> torch.Tensor:
    """bool [n], where a value of [n] differs from the one before it; the first always does."""
    starts = torch.ones_like(values, dtype=torch.bool)
    starts[1:] = values[1:] != values[:-1]
    return starts
