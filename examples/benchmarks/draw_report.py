"""Draw reports of `vllm-recycle bench --json`: speed-up by requests in flight, or by category.

    python examples/benchmarks/draw_report.py [--levels] result.json ... result.svg

Needs matplotlib, which the package's extra `plot` has. It draws tokens/s where a report has no
baseline. The ending of the picture's name says its format. Several reports are of one model and
machine; the colours suit a light and a dark page.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from vllm_recycle.cli.bench.report import BASELINE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reports", type=Path, nargs="+", help="what --json of the benchmark wrote")
    parser.add_argument("picture", type=Path, help="SVG, PNG or PDF, to be written")
    parser.add_argument(
        "--levels", action="store_true", help="by requests in flight, even with categories"
    )
    args = parser.parse_args()

    matplotlib.use("agg")
    # Text stays text in an SVG, and the same report makes the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "vllm_recycle"}
    colours = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    matplotlib.rcParams |= dict.fromkeys(colours, "0.5") | {"legend.framealpha": 0}
    reports, path = [json.loads(report.read_text()) for report in args.reports], args.picture
    rows = [row for report in reports for row in report["results"]]
    quantity = "speedup" if rows[0]["speedup"] is not None else "tokens_per_s"
    has_panels = rows[0]["categories"] and not args.levels
    draw = _draw_categories if has_panels else _draw_levels
    labels = {"speedup": "speed-up over plain decoding", "tokens_per_s": "tokens/s"}
    figure = draw(rows, quantity, labels[quantity])
    figure.suptitle(
        "{model}, {dtype}, {hardware[cores]} cores".format_map(
            reports[0]["conditions"] | {"model": Path(reports[0]["conditions"]["model"]).name}
        )
    )
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=150, metadata=metadata, transparent=True)


def _draw_levels(rows: list[dict[str, Any]], quantity: str, label: str) -> Any:
    """A line for each method over the requests in flight."""
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name in dict.fromkeys(row["method"] for row in rows):
        points = [(row["concurrency"], row[quantity]) for row in rows if row["method"] == name]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    levels = sorted({row["concurrency"] for row in rows})
    axes.set_xticks(levels, labels=map(str, levels))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="requests in flight", ylabel=label)
    axes.legend()
    return figure


def _draw_categories(rows: list[dict[str, Any]], quantity: str, label: str) -> Any:
    """Bars for each method by category and over all, one panel for each number in flight."""
    levels = sorted({row["concurrency"] for row in rows})
    figure, panels = pyplot.subplots(
        len(levels), figsize=(10, 3 * len(levels)), layout="constrained", squeeze=False
    )
    for level, axes in zip(levels, panels[:, 0], strict=True):
        results = [row for row in rows if row["concurrency"] == level]
        if quantity == "speedup":  # that of the baseline is the line at 1
            results = [row for row in results if row["method"] != BASELINE] or results
        names = list(results[0]["categories"])
        labels = [f"{name} ({one['runs']})" for name, one in results[0]["categories"].items()]
        labels.append("all")
        width = 0.8 / len(results)
        for number, row in enumerate(results):
            figures = [*(row["categories"][name] for name in names), row]
            offset = (number - (len(results) - 1) / 2) * width
            places = [group + offset for group in range(len(figures))]
            axes.bar(places, [one[quantity] for one in figures], width, label=row["method"])
        axes.set_xticks(range(len(names) + 1), labels=labels, rotation=30, ha="right")
        axes.axvline(len(names) - 0.5, color="0.8", linewidth=0.8)
        if quantity == "speedup":
            axes.axhline(1, color="0.5", linewidth=0.8)
        axes.set_ylabel(label)
        axes.set_title(f"{level} in flight", fontsize="medium")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    return figure


if __name__ == "__main__":
    main()
