"""A benchmark's report as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

MAX_OTHERS_SHARE = 0.05  # share of the CPUs that others used, above which the table says so
COLUMNS = (
    ("in flight", "concurrency", "d", 1),
    ("method", "method", "s", 1),
    ("tokens/s", "tokens_per_s", ".1f", 1),
    ("speed-up", "speedup", ".2f", 1),
    ("accepted", "mean_accepted_tokens", ".3f", 1),
    ("first pass", "mean_accepted_tokens_first_pass", ".3f", 1),
    ("rows", "rows_per_step", ".2f", 1),
    ("steps", "steps", "d", 1),
    ("step ms", "step_ms", ".2f", 1),
    ("draft forwards", "draft_forwards_per_round", ".2f", 1),
    ("equal %", "equal_share", ".1f", 100),
)


def format_table(report: dict[str, Any]) -> str:
    """A few lines of conditions and the results, one line each; columns without any value go."""
    conditions, results = report["conditions"], report["results"]
    form = "in the chat template" if conditions["chat"] else "as plain text"
    sampling = f"temperature {t:g}" if (t := conditions["temperature"]) else "greedy"
    passes = "the same prompts in every pass: methods that remember have seen them"
    if conditions["fresh_prompts"]:
        passes = "prompts of its own for each pass"
    lines = [
        "{model}, {num_prompts} prompts of {prompts}, ".format_map(conditions)
        + f"{form}, {conditions['max_tokens']} new tokens at most, {sampling}, "
        + f"{conditions['dtype']}, median of {conditions['repeats']}, {passes}",
        ", ".join(f"{name} {number}" for name, number in conditions["versions"].items()),
        "{device}, {cpu}, {cores} cores, {memory_gib} GiB".format_map(conditions["hardware"]),
        "",
    ]
    columns = [column for column in COLUMNS if any(row[column[1]] is not None for row in results)]
    cells = [[title for title, *_ in columns]]
    for result in results:
        values = [(result[key], form, scale) for _, key, form, scale in columns]
        cells.append(["-" if v is None else format(v * scale, form) for v, form, scale in values])
    lines += align(cells)
    for level in conditions["concurrency"]:
        rows = [row for row in results if row["concurrency"] == level and row["categories"]]
        lines += _category_lines(rows, level) if rows else ()
    share = max(max(result["others_cpu_share"]) for result in results)
    if share > MAX_OTHERS_SHARE:
        lines.append(f"disturbed: others used up to {share:.0%} of the CPUs in the timed passes")
    return "\n".join(lines)


def align(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table, all columns to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        yield "  ".join(padded).rstrip()


def _category_lines(results: Sequence[dict[str, Any]], concurrency: int) -> Iterator[str]:
    """Speed-up, or tokens/s where there is no baseline, and accepted tokens of each category."""
    quantity = "speedup" if results[0]["speedup"] is not None else "tokens_per_s"
    yield ""
    yield f"{quantity.replace('_per_', '/')} (accepted) with {concurrency} in flight"
    cells = [["", "runs", *(result["method"] for result in results)]]
    for name, category in results[0]["categories"].items():
        rows = [result["categories"].get(name) for result in results]
        cells.append([name, str(category["runs"]), *(_figure(row, quantity) for row in rows)])
    runs = sum(category["runs"] for category in results[0]["categories"].values())
    cells.append(["all", str(runs), *(_figure(result, quantity) for result in results)])
    yield from align(cells)


def _figure(figures: dict[str, Any] | None, quantity: str) -> str:
    if figures is None:
        return "-"
    accepted = figures["mean_accepted_tokens"]
    return f"{figures[quantity]:.2f}" + ("" if accepted is None else f" ({accepted:.2f})")
