"""`vllm-recycle tune`: options for your own models, prompts and machine.

    vllm-recycle tune --method ouroboros --model examples/models/target \
        --draft-model examples/models/draft --prompts examples/prompts/humaneval.jsonl \
        --output ouroboros.json
    vllm-recycle tune --method token_recycling --model examples/models/target \
        --prompts examples/prompts/humaneval.jsonl --output my_tree.json

The first searches the sizes of a draft by wall clock (`ouroboros`) and writes a speculative
configuration, the second measures which nodes of a tree are accepted (`tree`) and writes a
template. Both print what to give to `--speculative-config`. Every measurement goes to the
state file at once: the same command goes on where an earlier run was interrupted. Engines are
those of `vllm-recycle bench`.
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
from vllm_recycle.cli.bench.arguments import (
    add_workload,
    check_writable,
    json_object,
    number_range,
    positive,
    read_workload,
)
from vllm_recycle.cli.bench.methods import A_DRAFT_MODEL
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.tune.state import State
from vllm_recycle.integration.options import METHODS, OUROBOROS, TOKEN_RECYCLING

# The paper's, Table 10, for both kinds of tasks, and smaller ones for where rows are dear.
RANGES = {
    "gamma": ("2:14:2", 1, "tokens that the draft model drafts in a round"),
    "window": ("2,5,10,15,20", 0, "columns of the lookahead window, and as many guesses"),
    "phrase_length": ("4:8", 3, "tokens of a phrase with the one that it follows, L = beta + 1"),
    "max_forwards": ("0,1,2,4", 0, "draft forwards a round, at most gamma; 0 for gamma"),
    "early_rows": ("0,2,4,8", 0, "rows with phrases below them beside the last, at most gamma"),
}
OPTIONS_OF = {
    OUROBOROS: ("draft_model", "max_engines", "repeats", *RANGES),
    TOKEN_RECYCLING: ("max_nodes",),
}
# What is searched or has an option of its own, and files that engines would share.
REFUSED_KEYS = {"method", "model", "tree", "max_nodes", "num_speculative_tokens", *RANGES}
REFUSED_KEYS |= {"matrix_file", "pool_file"}
REPEATS = 3


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `tune` to the command."""
    parser = subparsers.add_parser(
        "tune", help="search a method's options for your models, prompts and machine"
    )
    parser.add_argument("--method", required=True, choices=OPTIONS_OF)
    add_workload(parser)
    for name, (default, least, meaning) in RANGES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=number_range(least),
            metavar="RANGE",
            help=f"ouroboros: {meaning}; FIRST:LAST[:STEP] or N,N,...; default: {default}",
        )
    parser.add_argument(
        "--repeats",
        type=positive,
        help=f"ouroboros: timed passes a candidate, each over an equal part of the prompts, "
        f"default: {REPEATS}",
    )
    parser.add_argument(
        "--max-nodes",
        type=positive,
        metavar="N",
        help="token_recycling: nodes of the tree; default: 80, of which a CPU takes the first 15",
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
    fixed = _fixed_keys(args)
    plan = Plan(
        **read_workload(args),
        methods={},
        repeats=args.repeats or REPEATS,
        fresh_prompts=args.method == OUROBOROS,
    )
    state_path = args.state or args.output.with_suffix(".state.json")
    for path in (args.output, state_path):
        check_writable(path)
    state = State(state_path, _conditions(args, plan, fixed))
    try:
        config = _tune(args, plan, state, fixed)
    except KeyboardInterrupt:
        if state_path.exists():
            print(f"{state_path} has what was measured: the same command goes on", file=sys.stderr)
        raise
    print(f"--speculative-config {shlex.quote(json.dumps(config))}")
    return 0


def _tune(
    args: argparse.Namespace, plan: Plan, state: State, fixed: dict[str, Any]
) -> dict[str, Any]:
    """The configuration found."""
    if args.method == OUROBOROS:
        from vllm_recycle.cli.tune.ouroboros import search

        config = search(plan, state, fixed, _ranges(args))
        args.output.write_text(json.dumps(config) + "\n", encoding="utf-8")
        print(f"{args.output} has the configuration, {state.path} what was measured")
        return config
    from vllm_recycle.cli.tune.tree import measure_tree

    tree, config = measure_tree(plan, state, fixed, max_nodes=args.max_nodes)
    tree.save(args.output)
    print(f"{args.output} has the tree, {state.path} what was measured")
    return config | {"tree": str(args.output.resolve())}


def _fixed_keys(args: argparse.Namespace) -> dict[str, Any]:
    """The keys of the speculative configuration that are given."""
    for method, options in OPTIONS_OF.items():
        for option in options if method != args.method else ():
            if getattr(args, option) is not None:
                raise UsageError(f"--{option.replace('_', '-')} belongs to --method {method}")
    fixed = json_object(args.speculative_config, "--speculative-config")
    if refused := REFUSED_KEYS & fixed.keys():
        raise UsageError(
            f"--speculative-config: got {min(refused)!r}, expected none of {sorted(REFUSED_KEYS)}"
        )
    sizes: dict[str, Any] = {"tree": "default"}  # one that is measured is a template
    if args.method == OUROBOROS:
        if args.draft_model is None:
            raise UsageError(f"--method ouroboros needs {A_DRAFT_MODEL}")
        is_directory = Path(args.draft_model).is_dir()
        model = str(Path(args.draft_model).resolve()) if is_directory else args.draft_model
        fixed = {"model": model, **fixed}
        # With what asks for the fewest rows: which candidates have too many is seen in the search.
        sizes = {name: min(values) for name, values in _ranges(args).items()}
        sizes |= {"early_rows": 0, "max_forwards": 1}
    try:
        METHODS[args.method].parse({**sizes, **fixed}, on_gpu=torch.cuda.is_available())
    except ValueError as error:
        raise UsageError(f"--speculative-config: {error}") from error
    return {"method": args.method, **fixed}


def _ranges(args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    return {
        name: getattr(args, name) or number_range(least)(default)
        for name, (default, least, _) in RANGES.items()
    }


def _conditions(args: argparse.Namespace, plan: Plan, fixed: dict[str, Any]) -> dict[str, Any]:
    """What measurements must share to be compared."""
    from vllm_recycle.cli.bench.report import hardware

    prompts = [prompt.turns for prompt in plan.prompts]
    return {
        "model": plan.model,
        "speculative_config": fixed,
        "prompts": str(plan.prompts_path),
        "num_prompts": len(plan.prompts),
        "chat": plan.chat,
        "prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "max_tokens": plan.max_tokens,
        "dtype": plan.dtype,
        "repeats": plan.repeats,
        "engine_args": dict(plan.engine_args),
        "versions": {"vllm_recycle": __version__, "vllm": version("vllm")},
        "hardware": hardware(),
    }
