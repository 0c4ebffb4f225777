"""The arithmetic of a step on three devices, and where what was measured takes over."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from device_costs import LLAMA_8B, QWEN_30B_A3B

from vllm_recycle.core.roofline import NO_WEIGHTS, Weights, device_of, touched_experts
from vllm_recycle.core.step_seconds import GraphShape, StepSeconds

A100, H100, H20 = (device_of(name) for name in ("A100-SXM4-80GB", "H100 80GB HBM3", "H20"))


def test_devices_are_known_by_the_names_that_cuda_gives_them():
    names = {
        "NVIDIA A100-SXM4-80GB": 2.039e12,
        "NVIDIA A100-PCIE-40GB": 1.555e12,
        "NVIDIA A100 80GB PCIe": 1.935e12,
        "NVIDIA H100 80GB HBM3": 3.35e12,
        "NVIDIA H100 PCIe": 2.0e12,
        "NVIDIA H100 NVL": 3.9e12,
        "NVIDIA H200": 4.8e12,
        "NVIDIA H20": 4.0e12,
        "NVIDIA H20-3e": 4.0e12,
        "NVIDIA L4": 0.3e12,
        "NVIDIA L40S": 0.864e12,
        "NVIDIA B200": 7.7e12,
    }
    assert {name: device_of(name).bandwidth for name in names} == names


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla V100", ""])
def test_a_device_that_is_not_known_is_none(name):
    assert device_of(name) is None


@pytest.mark.parametrize(("device", "free"), [(A100, 124), (H100, 240), (H20, 30)])
def test_rows_are_free_up_to_where_computing_takes_as_long_as_reading(device, free):
    """The H20 has the bandwidth of the H100 and a seventh of its FLOPS."""
    plain = LLAMA_8B.layers_seconds(device, 1)
    assert LLAMA_8B.layers_seconds(device, free - 5) == plain
    assert LLAMA_8B.layers_seconds(device, 2 * free) > 1.4 * plain


@pytest.mark.parametrize("device", [A100, H100, H20])
def test_weights_of_four_bits_have_a_quarter_of_the_free_rows(device):
    dense = Weights(LLAMA_8B.dense.count, LLAMA_8B.dense.num_bytes / 4)
    assert dense.seconds(device, 1) == pytest.approx(LLAMA_8B.dense.seconds(device, 1) / 4)
    rows = next(n for n in range(1, 999) if dense.seconds(device, n) > dense.seconds(device, 1))
    whole = LLAMA_8B.dense
    free = next(n for n in range(1, 999) if whole.seconds(device, n) > whole.seconds(device, 1))
    assert free / 4 <= rows <= free / 4 + 1


@pytest.mark.parametrize("device", [A100, H100, H20])
def test_rows_of_a_mixture_touch_more_experts(device):
    assert touched_experts(128, 8, 1) == pytest.approx(8)
    assert 127 < touched_experts(128, 8, 81) < 128
    one, tree = (QWEN_30B_A3B.layers_seconds(device, rows) for rows in (1, 81))
    assert tree > 3 * one  # where all weights are read anyway a tree of 80 is nearly free
    assert LLAMA_8B.layers_seconds(H100, 81) == LLAMA_8B.layers_seconds(H100, 1)


def test_many_rows_behind_a_long_context_are_bound_by_computing():
    given = {"requests": 1, "context": 32768}
    one, tree = (LLAMA_8B.attention_seconds(H100, rows=rows, **given) for rows in (1, 81))
    assert one == LLAMA_8B.attention_seconds(H100, rows=2, **given)
    assert tree > one
    assert LLAMA_8B.attention_seconds(H100, requests=1, rows=81, context=0) == 0


def test_layers_with_a_window_read_no_more_than_it():
    given = {"requests": 1, "rows": 1}
    windowed = replace(LLAMA_8B, windows=((512, 24),))
    half = replace(LLAMA_8B, windows=((512, 12), (1024, 4)))
    shares = {windowed: {512: 1, 2048: 7 / 16}, half: {512: 1, 2048: 1 - (12 * 3 + 4 * 2) / 128}}
    for model, share_of in shares.items():
        for context, share in share_of.items():
            seconds = LLAMA_8B.attention_seconds(H100, context=context, **given)
            found = model.attention_seconds(H100, context=context, **given)
            assert found == pytest.approx(share * seconds)


def test_a_measured_step_is_that_of_the_next_larger_graph():
    times = StepSeconds(H100, replace(LLAMA_8B, head=NO_WEIGHTS, logits_bytes=0))
    shapes = {(1, 1, 1): 5e-3, (4, 4, 1): 6e-3, (82, 6, 41): 7e-3}
    measured = {GraphShape(*shape): seconds for shape, seconds in shapes.items()}
    times = replace(times, measured=measured, drafting={8: 1e-3})
    assert times.at(0, requests=1) == 5e-3
    assert times.at(0, requests=2) == times.at(0, requests=4) == 6e-3
    assert times.at(40, requests=1) == 7e-3 + 1e-3
    # As many rows, of more requests; plain ones beside trees, and trees that are smaller.
    assert times.at(20, requests=3) == times.at(40, requests=6, drafting=1) == 7e-3 + 1e-3
    # No plain graph is left: that of trees has room.
    assert times.at(0, requests=5) == 7e-3
    # All of these read the same weights, and so does what has no graph: the median.
    assert times.at(0, requests=7) == pytest.approx(6e-3)
    # But with trees it would be launched layer by layer, as nothing was timed.
    assert times.at(80, requests=1) == times.at(40, requests=7, drafting=1) == math.inf


def test_prompts_beside_trees_have_no_graph():
    measured = {GraphShape(2, 2, 1): 1.0, GraphShape(162, 6, 81): 1.0}
    times = StepSeconds(H100, LLAMA_8B, measured)
    plain = StepSeconds(H100, LLAMA_8B)
    for drafting in (1, 2):
        assert 1.0 < times.at(80, requests=2, drafting=drafting) < 1.1
    given = {"requests": 2, "other_rows": 2048}
    assert times.at(80, **given) > 50 * plain.at(80, **given)
    assert plain.at(80, requests=2, other_rows=2048) > 4 * plain.at(80, requests=2)


def test_drafting_takes_what_the_next_larger_round_took():
    free = replace(LLAMA_8B, head=NO_WEIGHTS, logits_bytes=0)
    drafting = {1: 0.1, 4: 0.3, 8: 0.5}
    times = StepSeconds(H100, free, {GraphShape(99, 99, 99): 1.0}, drafting)
    seconds = [times.at(1, requests=20, drafting=n) - 1.0 for n in (1, 2, 4, 5, 8, 9)]
    assert seconds == pytest.approx([0.1, 0.3, 0.3, 0.5, 0.5, 0.5])
    assert times.at(0, requests=20) == 1.0
