"""Draw the dashboard of grafana.json from what a Prometheus server has seen, where no Grafana is.

    python examples/benchmarks/draw_dashboard.py --prometheus http://127.0.0.1:9090 --minutes 10

Needs matplotlib, which the package's extra `plot` has. `results/dashboard.svg` shows GSM8K
questions to the chat model of `make model` on two CPU cores, scraped every 3 s: 1, 8, 24 and 4 in
flight by turns.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DASHBOARD = Path(__file__).parents[1] / "grafana.json"
UNITS = {"s": "seconds", "percentunit": "share"}
RATE_INTERVAL = "30s"  # Grafana has four scrape intervals
POINTS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address")
    parser.add_argument("--model", default=".*", help="served model name, a regular expression")
    parser.add_argument("--minutes", type=float, default=10, help="up to now")
    parser.add_argument("--output", type=Path, default=Path("dashboard.svg"))
    args = parser.parse_args()

    panels = json.loads(DASHBOARD.read_text())["panels"]
    # Text stays text in an SVG.
    matplotlib.rcParams |= {"svg.fonttype": "none", "font.size": 8}
    figure = Figure(figsize=(11, 1.4 * len(panels)), layout="constrained")
    rows = 1 + max(panel["gridPos"]["y"] // panel["gridPos"]["h"] for panel in panels)
    for panel in panels:
        place = panel["gridPos"]
        number = 1 + place["y"] // place["h"] * 2 + place["x"] // place["w"]
        draw(figure.add_subplot(rows, 2, number), panel, args)
    figure.savefig(args.output, metadata={"Date": None})


def draw(axes: Axes, panel: dict[str, Any], args: argparse.Namespace) -> None:
    """Draw the lines of a panel, over the minutes that are left until now."""
    end = time.time()
    for target in panel["targets"]:
        query = target["expr"].replace('="$model"', f'=~"{args.model}"')
        query = query.replace("$__rate_interval", RATE_INTERVAL)
        for line in ask(args.prometheus, query, end - 60 * args.minutes, end):
            label = target["legendFormat"]
            for name, value in line["metric"].items():
                label = label.replace(f"{{{{{name}}}}}", value)
            times, values = zip(*line["values"], strict=True)
            minutes = [(moment - end) / 60 for moment in times]
            axes.plot(minutes, list(map(float, values)), linewidth=1, label=label)
    axes.set_title(panel["title"], loc="left", fontweight="bold")
    axes.set_ylabel(UNITS.get(panel["fieldConfig"]["defaults"]["unit"], ""))
    axes.set_xlim(-args.minutes, 0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(loc="upper left", ncols=2, fontsize="x-small").set_in_layout(False)


def ask(address: str, query: str, start: float, end: float) -> list[dict[str, Any]]:
    """What Prometheus answers: lines, of which each has `metric`, its labels, and `values`."""
    step = max(1, (end - start) / POINTS)
    fields = {"query": query, "start": start, "end": end, "step": step}
    url = f"{address}/api/v1/query_range?{urllib.parse.urlencode(fields)}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return lines


if __name__ == "__main__":
    main()
