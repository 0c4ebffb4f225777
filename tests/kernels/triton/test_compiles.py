"""What the interpreter does not show: that kernels compile for GPUs, and what to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("compile_kernels.py")
ROOT = SCRIPT.parents[3]

KB = 1024
# Of a program: data-centre Hopper and Blackwell; all others that we compile for, of which sm_80
# alone has more.
SHARED_MEMORY = {90: 227 * KB, 100: 227 * KB, 80: 99 * KB, 120: 99 * KB}


@pytest.fixture(scope="module")
def figures() -> list[dict[str, Any]]:
    """Of every case; see `compile_kernels`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


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
    attention = [figure for figure in figures if figure["case"].startswith("attend-")]
    assert [figure for figure in attention if not figure["async_copies"]] == []


def test_attention_of_large_trees_uses_the_matrix_instruction_of_hopper(figures):
    large = [
        figure
        for figure in figures
        if figure["arch"] == 90
        and figure["case"].startswith(("attend-bf16-rows81", "attend-fp16-rows81"))
    ]
    assert len(large) > 5
    assert [figure for figure in large if not figure["wgmma"]] == []
