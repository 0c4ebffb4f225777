"""What is the same for all layers of a step is made once, and their launches are no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kernels.triton.attention_steps import PAPER, SINKS, Shape, Step, assert_close
from tests.kernels.triton.compiler_process import printed_by
from vllm_recycle.core.adjacency import MatrixLayout
from vllm_recycle.kernels.triton.attention import tree_attention
from vllm_recycle.kernels.triton.matrix.find import Layout


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("own", [False, True], ids=["cached", "own"])
def test_layers_of_a_kind_are_planned_once_a_step(own, num_splits, monkeypatch):
    bound = []

    def watched(kernel, *args, **options):
        bound.append(kernel)
        return bind(kernel, *args, **options)

    bind = tree_attention.bind
    monkeypatch.setattr(tree_attention, "bind", watched)
    first, other = Step.make(PAPER, own=own), Step.make(PAPER, own=own)
    other.query.add_(1.0)
    layers = [first, replace(other, rows=first.rows)]
    for window, sinks in ((None, None), (20, None), (None, SINKS), (None, None)):
        for layer in layers:
            output = layer.attend(window=window, sinks=sinks, num_splits=num_splits)
            assert_close(output, layer.attend_in_torch(window=window, sinks=sinks))
    # Three kinds, of one launch or of two.
    assert len(bound) == 3 * min(num_splits, 2)


def test_layers_whose_tensors_lie_otherwise_are_of_other_kinds():
    step = Step.make(PAPER, shape=Shape(tokens_first=True))
    layer = replace(Step.make(PAPER, shape=Shape(tokens_first=False)), rows=step.rows)
    for one in (step, layer):
        assert_close(one.attend(num_splits=1), one.attend_in_torch())


@pytest.mark.slow
def test_the_launches_of_other_layers_are_those_that_triton_would_make():
    found = printed_by("launch_layers")
    assert found["again"]["launches"] == found["anew"]["launches"] != found["first"]["launches"]
    assert [launch[0] for launch in found["again"]["launches"]] == [
        "attend_kernel",
        "combine_kernel",
    ]
    assert [found[name]["looks"] for name in ("first", "again", "anew")] == [2, 0, 2]


def test_a_layout_is_made_for_kernels_once():
    layout = MatrixLayout(128, 8, (1, 2), 64, has_own=True, has_shared=True)
    assert Layout.of(layout) is Layout.of(layout)
