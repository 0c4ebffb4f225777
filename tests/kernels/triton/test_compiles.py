"""What the interpreter does not show: that kernels compile for GPUs, and what to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.triton.compiler_process import printed_by

pytestmark = pytest.mark.slow

KB = 1024
# Of a program: data-centre Hopper and Blackwell; all others that we compile for, of which sm_80
# alone has more.
SHARED_MEMORY = {90: 227 * KB, 100: 227 * KB, 80: 99 * KB, 120: 99 * KB}


@pytest.fixture(scope="module")
def figures() -> list[dict[str, Any]]:
    """Of every case; see `compile_kernels`."""
    return printed_by("compile_kernels")


def test_nothing_spills(figures):
    assert figures
    assert [figure for figure in figures if figure["spilled"]] == []


def test_shared_memory_suffices(figures):
    assert [figure for figure in figures if figure["shared"] > SHARED_MEMORY[figure["arch"]]] == []


def test_programs_fit_on_a_multiprocessor_as_often_as_planned(figures):
    # Sinks take registers that may cost a program.
    planned = [
        figure for figure in figures if figure["arch"] == 90 and "sinks" not in figure["case"]
    ]
    assert [figure for figure in planned if figure["resident"] < figure["taken_for"]] == []


def test_attention_copies_ahead_of_use_and_in_wide_pieces(figures):
    attention = [figure for figure in figures if figure["kernel"] == "attend_kernel"]
    assert [figure for figure in attention if not figure["async_copies"]] == []


def test_attention_of_large_trees_uses_the_matrix_instruction_of_hopper(figures):
    large = [
        figure
        for figure in figures
        if figure["arch"] == 90
        and figure["kernel"] == "attend_kernel"
        and figure["case"].startswith(("attend-bfloat16-rows81", "attend-float16-rows81"))
    ]
    assert len(large) > 5
    assert [figure for figure in large if not figure["wgmma"]] == []
