"""Tree attention in Triton with attention sinks: against its torch twin, and where they count."""

from __future__ import annotations

import pytest
import torch
from attention_steps import (
    CHAINED,
    PADDED,
    PAPER,
    SINKS,
    Request,
    Shape,
    Step,
    assert_close,
)

REQUESTS = (Request(26, 150), Request(0, 0), Request(3, 0), Request(9, 330))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("own", [False, True], ids=["cached", "own"])
def test_sinks_equal_the_reference(num_splits, window, own):
    step = Step.make(PAPER, REQUESTS, own=own)
    output = step.attend(num_splits=num_splits, window=window, sinks=SINKS)
    assert_close(output, step.attend_in_torch(window=window, sinks=SINKS))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_sinks_of_trees_below_padding_equal_the_reference(num_splits):
    step = Step.make(CHAINED, PADDED, own=True)
    output = step.attend(num_splits=num_splits, sinks=SINKS)
    assert_close(output, step.attend_in_torch(sinks=SINKS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_is_chosen_for_sixteen_bits_equals_the_reference(dtype):
    step, sinks = Step.make(PAPER, REQUESTS, Shape(dtype=dtype)), SINKS.to(dtype)
    assert_close(step.attend(tile=None, sinks=sinks), step.attend_in_torch(sinks=sinks))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_each_head_has_a_sink_of_its_own(num_splits):
    step = Step.make(PAPER, REQUESTS)
    with_sinks = step.attend(num_splits=num_splits, sinks=SINKS)[: step.num_rows]
    without = step.attend(num_splits=num_splits)[: step.num_rows]
    none = SINKS.isinf()
    assert_close(with_sinks[:, none], without[:, none])
    # The more of the weight is the sink's, the less is left for values.
    left = (with_sinks.norm(dim=2) / without.norm(dim=2)).mean(dim=0)
    assert left[0] > 0.9 > left[1] > 0.1 > left[2]
