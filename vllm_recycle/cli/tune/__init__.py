"""`vllm-recycle tune`: options for your own models, prompts and machine.

    vllm-recycle tune --model examples/models/target --draft-model examples/models/draft \
        --prompts examples/prompts/humaneval.jsonl --output ouroboros.json

It searches the sizes of `ouroboros` as published by wall clock and writes a configuration of it.
Every measurement goes to the state file at once, so that the same command goes on where an earlier
run was interrupted. A template for `token_recycling` is measured by `examples/tune_tree.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from vllm_recycle import __version__
from vllm_recycle.cli import UsageError
from vllm_recycle.cli.bench import arguments
from vllm_recycle.cli.bench.methods import A_DRAFT_MODEL
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.tune.ouroboros import State, search
from vllm_recycle.integration.options import OUROBOROS, PAPER, OuroborosOptions

# The paper's, Table 10, for both kinds of tasks, and smaller ones for where rows are dear.
RANGES = {
    "gamma": ("2:14:2", 1, "tokens that the draft model drafts in a round"),
    "window": ("2,5,10,15,20", 0, "columns of the lookahead window, and as many guesses"),
    "phrase_length": ("4:8", 3, "tokens of a phrase with the one that it follows, L = beta + 1"),
    "max_forwards": ("0,1,2,4", 0, "draft forwards a round, at most gamma; 0 for gamma"),
}
# What is searched or has an option of its own, and a file that engines would share.
REFUSED_KEYS = {"method", "model", "preset", "pool_file", *RANGES}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `tune` to the command."""
    parser = subparsers.add_parser(
        "tune",
        help="search the sizes of ouroboros as published for your models, prompts and machine",
    )
    arguments.add_workload(parser)
    for name, (default, least, meaning) in RANGES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=arguments.number_range(least),
            default=default,
            metavar="RANGE",
            help=f"{meaning}; FIRST:LAST[:STEP] or N,N,...; default: {default}",
        )
    parser.add_argument(
        "--repeats",
        type=arguments.positive,
        default=3,
        help="timed passes per candidate, each over an equal part of the prompts; default: "
        "%(default)s",
    )
    parser.add_argument(
        "--speculative-config",
        default="{}",
        metavar="JSON",
        help="further keys of the method, which are not searched; a range of one value fixes those "
        "that have one",
    )
    parser.add_argument("--output", required=True, type=Path, help="the file to write")
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="what was measured so far; default: --output with .state.json",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Check the arguments, measure what the state file lacks, write the result."""
    ranges = {name: getattr(args, name) for name in RANGES}
    fixed = _fixed_keys(args)
    workload = arguments.read_workload(args)
    plan = Plan(**workload, methods={}, repeats=args.repeats, fresh_prompts=True)
    state_path = args.state or args.output.with_suffix(".state.json")
    for path in (args.output, state_path):
        arguments.check_writable(path)
    state = State(state_path, _conditions(plan, fixed))
    try:
        config = search(plan, state, fixed, ranges)
    except KeyboardInterrupt:
        if state_path.exists():
            print(f"{state_path} has what was measured: the same command goes on", file=sys.stderr)
        raise
    args.output.write_text(json.dumps(config) + "\n", encoding="utf-8")
    print(f"{args.output} has the configuration, {state_path} what was measured")
    print(f"--speculative-config {shlex.quote(json.dumps(config))}")
    return 0


def _fixed_keys(args: argparse.Namespace) -> dict[str, Any]:
    """The keys of the speculative configuration that are given."""
    given = arguments.json_object(args.speculative_config, "--speculative-config")
    if refused := REFUSED_KEYS & given.keys():
        raise UsageError(
            f"--speculative-config: got {min(refused)!r}, expected none of {sorted(REFUSED_KEYS)}"
        )
    if args.draft_model is None:
        raise UsageError(f"tune needs {A_DRAFT_MODEL}")
    is_directory = Path(args.draft_model).is_dir()
    model = str(Path(args.draft_model).resolve()) if is_directory else args.draft_model
    # The smallest sizes. Which candidates have too many rows is seen in the search.
    sizes = {"preset": PAPER, "gamma": 1, "window": 1, "guesses": 1, "phrase_length": 3}
    try:
        OuroborosOptions.parse({"model": model, **sizes, **given}, on_gpu=torch.cuda.is_available())
    except ValueError as error:
        raise UsageError(f"--speculative-config: {error}") from error
    return {"method": OUROBOROS, "model": model, "preset": PAPER, **given}


def _conditions(plan: Plan, fixed: dict[str, Any]) -> dict[str, Any]:
    """What measurements must share to be compared."""
    from vllm_recycle.cli.bench.report import hardware

    prompts = [prompt.turns for prompt in plan.prompts]
    names = ("model", "chat", "max_tokens", "dtype", "repeats", "engine_args")
    return {
        **{name: getattr(plan, name) for name in names},
        "prompts": str(plan.prompts_path),
        "num_prompts": len(plan.prompts),
        "speculative_config": fixed,
        "prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "versions": {"vllm_recycle": __version__, "vllm": version("vllm")},
        "hardware": hardware(),
    }
