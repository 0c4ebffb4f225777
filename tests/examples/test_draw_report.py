"""The picture of a benchmark's report says what was measured: by category, or by load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples/benchmarks"


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        (["cpu-copies.json"], ["rename (4)", "all", "1 in flight", "suffix"]),
        (["cpu-json-schema.json"], ["requests in flight", "none", "ngram", "suffix"]),
        (
            ["--levels", "cpu-chat-amx.json", "cpu-speedups.json"],
            ["requests in flight", "16", "ngram", "suffix"],
        ),
    ],
)
def test_reports_are_drawn(reports, expected, tmp_path):
    picture = tmp_path / "result.svg"
    command = [sys.executable, BENCHMARKS / "draw_report.py", *reports, picture]
    subprocess.run(command, check=True, cwd=BENCHMARKS / "results")
    texts = " ".join(ElementTree.parse(picture).getroot().itertext())
    always = ["token_recycling", "speed-up over plain decoding", "smollm2-135m-instruct"]
    for text in [*expected, *always]:
        assert text in texts
