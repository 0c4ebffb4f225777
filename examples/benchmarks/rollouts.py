"""Tokens per call of the target in roll-outs at temperature 1, by epoch; see `../rollouts.py`.

    make model suffix
    python examples/benchmarks/rollouts.py --model examples/models/smollm2-135m-instruct \
        --json examples/benchmarks/results/cpu-rollouts.json

Weights stay as they are, so that all methods sample from one distribution. Each epoch has seeds of
its own. Samples of a method are compared with those without speculation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import rollouts
import vllm

from vllm_recycle.cli.bench import methods
from vllm_recycle.cli.bench.report import origin

TREES = methods.METHODS["token_recycling"]
METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "suffix": methods.METHODS["suffix"],
    **{f"{nodes} nodes": {**TREES, "max_nodes": nodes, "row_cost": 0} for nodes in (7, 16, 48)},
    "priced": TREES,
}
OWNED = [name for name, method in METHODS.items() if method and method["method"] != "suffix"]


def main() -> None:
    parser = rollouts.make_parser(__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.set_defaults(prompts=6, batch=6)
    args = parser.parse_args()
    report = {
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "methods": METHODS,
        **origin(vllm=vllm.__version__),
    }
    runs = [*METHODS, *(f"{name}, owners" for name in OWNED)]
    results, plain = {}, []
    for run in runs:
        name, _, owners = run.partition(", ")
        epochs = measure(args, METHODS[name], has_owners=bool(owners))
        plain = plain or [epoch["tokens"] for epoch in epochs]
        pairs = zip(epochs, plain, strict=True)
        equal = [
            sum(map(list.__eq__, epoch.pop("tokens"), others)) / len(others)
            for epoch, others in pairs
        ]
        results[run] = {"epochs": epochs, "equal_share": equal}
        rates = ", ".join(f"{epoch['tokens_per_call']:.2f}" for epoch in epochs)
        print(f"{run:20} {rates}; equal {min(equal):.0%}", flush=True)
        if args.json:  # what there is so far
            report["results"] = results
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(
    args: argparse.Namespace, method: dict[str, Any] | None, *, has_owners: bool
) -> list[dict[str, Any]]:
    """What each epoch took, and its tokens."""
    sampler = rollouts.Sampler(args.model, method, args.samples, args.max_tokens)
    sampler.has_owners = has_owners
    epochs = []
    for epoch, questions in rollouts.batches(args):
        before, started = sampler.counted(), time.perf_counter()
        answers = [one for group in sampler.answers(questions, seed=epoch) for one in group]
        counted = sampler.counted() - before
        epochs.append(
            {
                "tokens_per_call": counted["tokens"] / counted["calls"],
                "seconds": time.perf_counter() - started,
                "tokens": [answer.token_ids for answer in answers],
            }
        )
    sampler.llm.llm_engine.engine_core.shutdown()
    return epochs


if __name__ == "__main__":
    main()
