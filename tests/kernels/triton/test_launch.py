"""What is the same for all layers of a step is made once, and their launches are no others."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from tests.kernels.triton.attention_steps import PAPER, SINKS, Shape, Step, assert_close
from tests.kernels.triton.compiler_process import printed_by
from vllm_recycle.core.adjacency import MatrixLayout
from vllm_recycle.kernels.triton.attention import tree_attention
from vllm_recycle.kernels.triton.matrix.find import Layout


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("own", [False, True], ids=["cached", "own"])
def test_layers_of_a_kind_are_planned_once_a_step(own, num_splits, monkeypatch):
    bind = mock.Mock(wraps=tree_attention.bind)
    monkeypatch.setattr(tree_attention, "bind", bind)
    layouts = (True, True, False)
    first, *others = (Step.make(PAPER, shape=Shape(tokens_first=one), own=own) for one in layouts)
    others[0].query.add_(1.0)
    layers = [first, *(replace(other, rows=first.rows) for other in others)]
    for window, sinks in ((None, None), (20, None), (None, SINKS), (None, None)):
        for layer in layers:
            output = layer.attend(window=window, sinks=sinks, num_splits=num_splits)
            assert_close(output, layer.attend_in_torch(window=window, sinks=sinks))
    # Three kinds, and three whose tensors lie otherwise, of one launch or of two.
    assert bind.call_count == 2 * 3 * min(num_splits, 2)


@pytest.mark.slow
def test_the_launches_of_other_layers_are_those_that_triton_would_make():
    found = printed_by("launch_layers")
    assert found["again"]["launches"] == found["anew"]["launches"] != found["first"]["launches"]
    names = [launch[0] for launch in found["again"]["launches"]]
    assert names == ["attend_kernel", "combine_kernel"]
    assert [found[name]["looks"] for name in ("first", "again", "anew")] == [2, 0, 2]


def test_a_layout_is_made_for_kernels_once():
    layout = MatrixLayout(128, 8, (1, 2), 64, has_own=True, has_shared=True)
    assert Layout.of(layout) is Layout.of(layout)
