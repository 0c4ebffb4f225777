"""Write the page of speed-ups by model and load, from reports of `vllm-recycle bench --json`.

python examples/benchmarks/speedups.py > examples/benchmarks/speedups.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_recycle.cli.bench.report import BASELINE

RESULTS = Path(__file__).parent / "results"
# The class of a model, by the report.
MODELS = {
    "cpu-speedups": "a small dense model: 135M parameters, 30 layers",
    "cpu-speedups-pair": "a deep dense model of 150 layers, with a draft model of 28",
    "h200-wide-peers": "a wide dense model, of the shape of Llama-3-8B; methods that gave a result",
}
LOSS = "▼"
HEAD = f"""\
# Speed-ups by model and load

`speedups.py` writes this page from reports of `vllm-recycle bench`, one table per report. Models
and machines differ: `vllm-recycle bench` measures yours.

Requests in flight are the most at a time. A pass ends with fewer, so the mean is below: the heading
has that of plain decoding.

A cell has the speed-up over plain decoding, and in brackets tokens per step. {LOSS} marks a loss.
The best method of a column is bold. The last column has the share of outputs that equal those of
plain decoding. In 16 bits near-ties of two tokens fall either way, with any method. Version 0.1.0
of vllm_recycle has no copies of a request's own text."""


def main() -> None:
    print(HEAD, *(line for name in MODELS for line in _section(name)), sep="\n")


def _section(name: str) -> Iterator[str]:
    """A report's model, machine, table and command."""
    report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    conditions, results = report["conditions"], report["results"]
    hardware, levels = conditions["hardware"], conditions["concurrency"]
    versions = conditions["versions"]
    passes = conditions["repeats"] * len(levels) + 1
    machine = hardware["device"]
    if machine == "cpu":
        machine = f"{hardware['cpu']}, {hardware['cores']} cores"
    yield f"\n## {Path(conditions['model']).name}: {MODELS[name]}\n"
    yield (
        f"{machine}, {conditions['dtype']}, vLLM {versions['vllm']}, "
        f"vllm_recycle {versions['vllm_recycle']} (`{name}.json`). "
        f"Medians of {conditions['repeats']} passes with "
        f"{conditions['num_prompts'] // passes} prompts each.\n"
    )
    plain_rows = [row for row in results if row["method"] == BASELINE]
    pairs = zip(levels, map(_mean_in_flight, plain_rows), strict=True)
    titles = ["method", *(f"{level} in flight, mean {mean:.1f}" for level, mean in pairs), "equal"]
    yield f"| {' | '.join(titles)} |"
    yield f"| {' | '.join('---' for _ in titles)} |"
    for method in conditions["methods"]:
        rows = [row for row in results if row["method"] == method]
        cells = [_cell(row, results) for row in rows]
        equal = ", ".join(format(row["equal_share"], ".0%") for row in rows)
        yield f"| {' | '.join([f'`{method}`', *cells, equal])} |"
    yield f"\n    {conditions['command']}"


def _mean_in_flight(row: dict[str, Any]) -> float:
    """Requests per engine step, those that end their prompt in it included."""
    return (row["steps"] + row["requests"]) / row["engine_steps"]


def _cell(row: dict[str, Any], results: list[dict[str, Any]]) -> str:
    if row["method"] == BASELINE:
        return f"{row['tokens_per_s']:.1f} tokens/s"
    rivals = [other for other in results if other["concurrency"] == row["concurrency"]]
    speedup = format(row["speedup"], ".2f")
    if row["speedup"] < 1:
        speedup = f"{LOSS} {speedup}"
    elif row["speedup"] == max(rival["speedup"] for rival in rivals):
        speedup = f"**{speedup}**"
    return f"{speedup} ({row['mean_accepted_tokens']:.2f})"


if __name__ == "__main__":
    main()
