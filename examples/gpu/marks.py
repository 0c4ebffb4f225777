"""Marks: what a benchmark should reach, what it does reach, and whether that is enough."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def judge(found: Iterable[tuple[str, float, float]], *, judged: bool) -> list[dict[str, Any]]:
    """For the report; of each its name, its limit and its value, which is not to be larger."""
    return [
        {
            "mark": name,
            "limit": limit,
            "value": value,
            "verdict": ("PASS" if value <= limit else "FAIL") if judged else "not judged",
        }
        for name, limit, value in found
    ]


def lines(marks: Iterable[dict[str, Any]]) -> list[str]:
    return ["{verdict}: {mark}: {value:.3g}, limit {limit:g}".format_map(mark) for mark in marks]
