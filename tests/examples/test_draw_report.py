"""The picture of a benchmark's report says what was measured: by category, or by load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples/benchmarks"


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ("cpu-copies.json", ["rename (4)", "all", "1 in flight", "suffix"]),
        ("cpu-json-schema-compiled.json", ["requests in flight", "none", "ngram", "suffix"]),
    ],
)
def test_a_report_is_drawn(report, expected, tmp_path):
    picture = tmp_path / "result.svg"
    report = BENCHMARKS / "results" / report
    subprocess.run([sys.executable, BENCHMARKS / "draw_report.py", report, picture], check=True)
    texts = " ".join(ElementTree.parse(picture).getroot().itertext())
    for text in [*expected, "token_recycling", "speed-up over none", "smollm2-135m-instruct"]:
        assert text in texts
