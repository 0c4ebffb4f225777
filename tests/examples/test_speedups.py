"""The page of speed-ups is what its script makes of the reports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples/benchmarks"


def test_the_page_is_made_from_the_reports():
    command = [sys.executable, BENCHMARKS / "speedups.py"]
    page = subprocess.run(command, check=True, capture_output=True, text=True)
    assert page.stdout == (BENCHMARKS / "speedups.md").read_text("utf-8")
    assert "▼" in page.stdout  # losses are shown, and these reports have some
