"""A benchmark's report as a picture: speed-up by requests in flight, or by category."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_recycle.cli.bench.report import BASELINE


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the speed-up (without a baseline: tokens/s), in the format of the path's ending."""
    import matplotlib

    matplotlib.use("agg")
    # Text stays text in an SVG, and the same report makes the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "vllm_recycle"}
    from matplotlib import pyplot

    rows = report["results"]
    quantity = "speedup" if rows[0]["speedup"] is not None else "tokens_per_s"
    draw = _draw_categories if rows[0]["categories"] else _draw_levels
    figure = draw(
        pyplot, rows, quantity, "speed-up over none" if quantity == "speedup" else "tokens/s"
    )
    figure.suptitle(
        "{model}, {dtype}, {hardware[cores]} cores".format_map(
            report["conditions"] | {"model": Path(report["conditions"]["model"]).name}
        )
    )
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _draw_levels(pyplot: Any, rows: list[dict[str, Any]], quantity: str, label: str) -> Any:
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


def _draw_categories(pyplot: Any, rows: list[dict[str, Any]], quantity: str, label: str) -> Any:
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
