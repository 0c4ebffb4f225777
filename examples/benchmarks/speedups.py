"""Write the page of speed-ups by model and load, from reports of `vllm-recycle bench --json`.

cd examples/benchmarks; python speedups.py results/cpu-speedups-*.json > speedups.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_recycle.cli.bench.report import BASELINE

LOSS = "▼"
HEAD = f"""\
# Speed-ups by model and load

`speedups.py` writes this page from reports of `vllm-recycle bench`, one table per report. Models
and machines differ: `vllm-recycle bench` measures yours.

A cell has the speed-up over plain decoding, and in brackets tokens per step. {LOSS} marks a loss.
The best method of a column is bold. The last column has the share of outputs that equal those of
plain decoding. In 16 bits near-ties of two tokens fall either way, with any method.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reports", type=Path, nargs="+", help="what --json of the benchmark wrote")
    sections = [line for path in parser.parse_args().reports for line in _section(path)]
    print(HEAD, *sections, sep="\n")


def _section(path: Path) -> Iterator[str]:
    """A report's model, machine, table and command."""
    report = json.loads(path.read_text(encoding="utf-8"))
    conditions, results = report["conditions"], report["results"]
    engine = conditions["engines"][BASELINE]
    hardware, versions = conditions["hardware"], conditions["versions"]
    levels = conditions["concurrency"]
    yield f"## {Path(conditions['model']).name}\n"
    passes = conditions["repeats"] * len(levels) + 1
    yield (
        f"`{engine['architecture']}`, {engine['layers']} layers, {conditions['dtype']}. "
        f"{hardware['cpu']} ({hardware['device']}), {hardware['cores']} cores. "
        f"vLLM {versions['vllm']}, `{path.name}`. "
        f"Prompts per pass: {conditions['num_prompts'] // passes}. "
        f"Passes: {conditions['repeats']}; the table has medians.\n"
    )
    titles = ["method", *(f"{level} in flight" for level in levels), "equal"]
    yield f"| {' | '.join(titles)} |"
    yield "|" + " --- |" * len(titles)
    best = {
        level: max(row["speedup"] for row in results if row["concurrency"] == level)
        for level in levels
    }
    for name in conditions["methods"]:
        rows = {row["concurrency"]: row for row in results if row["method"] == name}
        cells = [f"`{name}`", *(_cell(rows[level], best[level]) for level in levels)]
        equal = [format(row["equal_share"], ".0%") for row in rows.values()]
        yield f"| {' | '.join([*cells, ', '.join(equal)])} |"
    yield f"\n    {conditions['command']}\n"


def _cell(row: dict[str, Any], best: float) -> str:
    if row["method"] == BASELINE:
        return f"{row['tokens_per_s']:.1f} tokens/s"
    speedup = f"{row['speedup']:.2f}"
    if row["speedup"] < 1:
        speedup = f"{LOSS} {speedup}"
    elif row["speedup"] == best:
        speedup = f"**{speedup}**"
    return f"{speedup} ({row['mean_accepted_tokens']:.2f})"


if __name__ == "__main__":
    main()
