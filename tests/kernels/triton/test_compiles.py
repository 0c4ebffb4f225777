"""What the interpreter does not show: that kernels compile for GPUs, and what to."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.kernels.triton.compiler_process import printed_by

pytestmark = pytest.mark.slow

# Of a program: data-centre Hopper and Blackwell; all others that we compile for, of which sm_80
# alone has more.
SHARED_MEMORY = {90: 227 << 10, 100: 227 << 10, 80: 99 << 10, 120: 99 << 10}


@pytest.fixture(scope="module")
def figures() -> list[dict[str, Any]]:
    """Of every case; see `compile_kernels`."""
    return printed_by("compile_kernels")


def test_nothing_spills_and_shared_memory_suffices(figures):
    assert {one["arch"] for one in figures} == {*SHARED_MEMORY}
    assert [one for one in figures if one["spilled"]] == []
    assert [one for one in figures if one["shared"] > SHARED_MEMORY[one["arch"]]] == []


def test_programs_fit_on_a_multiprocessor_as_often_as_planned(figures):
    # Sinks take registers that may cost a program.
    planned = [one for one in figures if one["arch"] == 90 and "sinks" not in one["case"]]
    assert [one for one in planned if one["resident"] < one["taken_for"]] == []


def test_the_log_counts_kernels_that_the_cache_did_not_have(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    first, again = (printed_by("compile_times") for _ in range(2))
    assert re.fullmatch(r"compiled 1 kernels in \d+\.\d s", first)
    assert again is None


def test_attention_copies_ahead_and_on_hopper_its_matrix_instruction_is_used(figures):
    """In wide pieces; of trees that are large enough for it."""
    attention = [one for one in figures if one["kernel"] == "attend_kernel"]
    assert [one for one in attention if not one["async_copies"]] == []
    large = [one for one in attention if one["arch"] == 90 and "81 rows" in one["case"]]
    assert len(large) > 5
    assert [one for one in large if not one["wgmma"]] == []
