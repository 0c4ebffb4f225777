"""What the reports of `first_hour.sh` say, in words: right or wrong, and which estimates held.

    python examples/gpu/verdict.py FOLDER

The estimates were made by counting, before anything had run on a GPU: for an H100 SXM and
Llama-3-8B in bfloat16, of kernels to 30 %. They are in `estimates.json`; `estimates.py` makes those
of steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from vllm_recycle.cli.bench.table import format_table

ESTIMATES = Path(__file__).with_name("estimates.json")
TESTS = {
    "twins": "kernels against their references",
    "engine": "the default engine against plain vLLM",
    "engines": "engines against plain vLLM",
}
REPORTS = ("kernels", "step_time")


def verdict(folder: Path) -> Iterator[str]:
    """Its lines; what a part of the first hour did not leave is named."""
    yield from machine(read(folder / "operators.json"))
    for name, what in TESTS.items():
        yield f"{what}: {tests(folder / f'{name}.xml')}"
    reports = {name: read(folder / f"{name}.json") for name in REPORTS}
    for name, report in reports.items():
        yield from (f"{name}: {line}" for line in marks_of(report))
    if peers := read(folder / "peers.json"):
        yield from format_table(peers).splitlines()
    held, found = 0, 0
    for estimate in json.loads(ESTIMATES.read_text()):
        value = look_up(reports[estimate["report"]], estimate)
        said = judge(value, estimate["from"], estimate["to"])
        held, found = held + (said == "as estimated"), found + (value is not None)
        yield f"{estimate['what']}: {said}"
    yield f"{held} of {found} estimates held"


def machine(report: dict[str, Any] | None) -> Iterator[str]:
    """Device and versions, and how far vLLM's own operators are off."""
    if report is None:
        yield "vLLM's operators: no report"
        return
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    yield "{device}, driver {driver}, ".format_map(report) + versions
    outcomes = "; ".join(f"{name} {text}" for name, text in report["operators"].items())
    yield f"vLLM's operators: {outcomes}"


def tests(path: Path) -> str:
    """The outcome of a run of pytest, by its JUnit file."""
    if not path.exists():
        return f"not run, there is no {path.name}"
    suite = next(ElementTree.parse(path).iter("testsuite"))
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    bad = count["failures"] + count["errors"]
    ran = count["tests"] - count["skipped"]
    names = [
        case.get("name") or ""
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    if not ran:
        return "none ran"
    return f"{bad} of {ran} failed: {', '.join(names)}" if bad else f"all {ran} passed"


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def marks_of(report: dict[str, Any] | None) -> Iterator[str]:
    """What a benchmark itself says of its marks."""
    if report is None:
        yield "not run"
        return
    for mark in report["marks"]:
        yield "{verdict}: {mark}: {value:.3g}, limit {limit:g}".format_map(mark)


def look_up(report: dict[str, Any] | None, estimate: dict[str, Any]) -> float | None:
    """The figure that was estimated; None where it was not measured."""
    if "times" in (report or {}).get("conditions", ()):  # which mean nothing, of a smoke run
        return None
    for row in (report or {}).get(estimate["list"], ()):
        if all(row.get(key) == value for key, value in estimate["where"].items()):
            for key in estimate["value"]:
                row = row[key]
            return row
    return None


def judge(value: float | None, least: float, most: float) -> str:
    if value is None:
        return "not measured"
    if least <= value <= most:
        return "as estimated"
    missed = value / most if value > most else least / value
    side = "more" if value > most else "less"
    return f"{value:.3g} where {least:g} to {most:g} was estimated, {missed:.2f} times {side}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    text = "\n".join(verdict(folder))
    (folder / "verdict.txt").write_text(text + "\n")
    print(text)
