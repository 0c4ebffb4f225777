"""`vllm-recycle bench`: decoding methods side by side on one model and one prompt file.

    vllm-recycle bench --model examples/models/target --prompts examples/prompts/gsm8k.jsonl \
        --num-prompts 20 --dtype float32 --methods none,ngram,token_recycling --json result.json

Every method runs in a process of its own, one at work at a time; repeats are interleaved, so that a
machine that slows down slows every method. `arguments`, `prompts` and `methods` check the command
line and make a `plan` of it. `driver` leads the processes, `worker` is one of them. `report` makes
the JSON, `table` what is shown. Nothing but the worker imports vLLM, so that bad arguments are
refused at once.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm_recycle.cli import RunError
from vllm_recycle.cli.bench import methods
from vllm_recycle.cli.bench.arguments import add_workload, numbers, positive, temperature
from vllm_recycle.cli.bench.plan import make_plan
from vllm_recycle.core.state_file import StateFileError, write_file


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `bench` to the command."""
    parser = subparsers.add_parser(
        "bench", help="measure methods side by side on one model and one prompt file"
    )
    add_workload(parser)
    _add_methods(parser)
    _add_passes(parser)
    parser.add_argument(
        "--by-category",
        action="store_true",
        help="report each `category` of the prompt file as well as all prompts",
    )
    parser.add_argument(
        "--json", type=Path, dest="json_path", metavar="JSON", help="write the result to this file"
    )
    parser.set_defaults(func=run)


def _add_methods(parser: argparse.ArgumentParser) -> None:
    """Add what is compared."""
    parser.add_argument(
        "--methods",
        help=f"from {', '.join(methods.METHODS)} (hints: token_recycling, told each "
        "line's `hint`), with --draft-model draft_model and ouroboros, "
        f"and the names given by --speculative-config; default: {methods.DEFAULT_METHODS}, with "
        f"--draft-model {methods.DEFAULT_METHODS_WITH_DRAFT_MODEL}; suffix only where its package "
        "is installed",
    )
    parser.add_argument(
        "--draft-tokens",
        type=numbers,
        metavar="N[,N...]",
        help="tokens that vLLM's draft_model drafts; several make the methods draft_model-N; "
        f"default: {methods.DEFAULT_DRAFT_TOKENS}",
    )
    parser.add_argument(
        "--speculative-config",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="add a method, or replace one, by its speculative_config; may be repeated",
    )


def _add_passes(parser: argparse.ArgumentParser) -> None:
    """Add how the prompts are run."""
    parser.add_argument("--ignore-eos", action="store_true", help="always emit --max-tokens tokens")
    parser.add_argument(
        "--concurrency",
        type=numbers,
        default=(1,),
        help="requests in flight, for example 1,2,4; default: 1",
    )
    parser.add_argument(
        "--temperature",
        type=temperature,
        default=0.0,
        help="sample, each prompt with a seed of its own; default: 0, greedy",
    )
    parser.add_argument("--repeats", type=positive, default=3, help="default: %(default)s")
    parser.add_argument(
        "--fresh-prompts",
        action="store_true",
        help="give the first pass and each repeat prompts of their own, an equal part of the file",
    )


def run(args: argparse.Namespace) -> int:
    """Check the arguments, measure, report."""
    plan = make_plan(args)
    from vllm_recycle.cli.bench.driver import measure
    from vllm_recycle.cli.bench.report import make_report
    from vllm_recycle.cli.bench.table import format_table

    report = make_report(plan, measure(plan))
    try:
        if plan.json_path:
            text = json.dumps(report, indent=1) + "\n"
            write_file(plan.json_path, text.encode(), kind="--json")
    except StateFileError as error:
        raise RunError(str(error)) from None
    finally:  # what took hours to measure is not lost with a full disk
        print(format_table(report))
        print(json.dumps(report))
    return 0
