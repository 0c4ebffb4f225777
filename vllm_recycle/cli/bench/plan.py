"""What a benchmark run measures: its arguments, checked before anything slow starts."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_recycle.cli import UsageError
from vllm_recycle.integration.options import METHODS as PLUGIN_METHODS

SpeculativeConfig = dict[str, Any] | None  # None: plain decoding

DTYPES = ("auto", "float32", "bfloat16", "float16")
METHODS: dict[str, SpeculativeConfig] = {
    "none": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    },
    "suffix": {"method": "suffix"},
    "token_recycling": {"method": "token_recycling"},
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of the benchmark."""

    model: str
    prompts_path: Path
    prompts: tuple[str, ...]
    methods: dict[str, SpeculativeConfig]
    concurrency: tuple[int, ...]
    repeats: int
    max_tokens: int
    ignore_eos: bool
    dtype: str
    engine_args: dict[str, Any]
    profile: bool
    json_path: Path | None
    plot_path: Path | None

    @property
    def first_pass_concurrency(self) -> int:
        return min(self.concurrency)


def needs_plugin(config: SpeculativeConfig) -> bool:
    """All other methods run with this plugin excluded."""
    return config is not None and config.get("method") in PLUGIN_METHODS


def make_plan(args: argparse.Namespace) -> Plan:
    """Check the parsed arguments.

    Raises:
        UsageError: for anything that cannot be accepted.
    """
    _check_model(args.model)
    prompts = read_prompts(args.prompts)
    if args.num_prompts and args.num_prompts > len(prompts):
        raise UsageError(
            f"--num-prompts is {args.num_prompts}, but {args.prompts} has {len(prompts)} prompts"
        )
    for path in (args.json, args.plot):
        if path and not path.resolve().parent.is_dir():
            raise UsageError(f"{path} cannot be written: no directory {path.resolve().parent}")
    if args.plot and not find_spec("matplotlib"):
        raise UsageError("--plot needs matplotlib: pip install matplotlib")
    return Plan(
        model=args.model,
        prompts_path=args.prompts,
        prompts=prompts[: args.num_prompts],
        methods=_methods(args),
        concurrency=args.concurrency,
        repeats=args.repeats,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        dtype=args.dtype,
        engine_args=_json_object(args.engine_args, "--engine-args"),
        profile=not args.no_profile,
        json_path=args.json,
        plot_path=args.plot,
    )


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a JSON lines file, in file order; blank lines are skipped.

    Raises:
        UsageError: naming the line that is not a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path} cannot be read: {error}") from error
    prompts = tuple(
        _prompt(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not prompts:
        raise UsageError(f"{path} has no prompts, expected one JSON object a line")
    return prompts


def positive(text: str) -> int:
    """An argument type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


def positive_list(text: str) -> tuple[int, ...]:
    """An argument type: integers of at least 1, separated by commas, none twice."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts) or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected different integers of at least 1, for example 1,2,4"
        )
    return tuple(map(int, parts))


def _prompt(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error.msg})") from error
    if not isinstance(row, dict) or not {"prompt", "turns"} & row.keys():
        raise UsageError(f"{where}: neither `prompt` nor `turns`, expected one of them")
    turns = row.get("turns")
    prompt = (
        row["prompt"]
        if "prompt" in row
        else turns[0]
        if isinstance(turns, list) and turns
        else None
    )
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(
            f"{where}: `prompt` must be a string, `turns` a list of strings, not empty"
        )
    return prompt


def _check_model(model: str) -> None:
    if (Path(model) / "config.json").is_file():
        return
    if Path(model).exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):
        raise UsageError(
            f"--model {model}: no config.json there, expected a model directory or ORG/NAME"
        )


def _methods(args: argparse.Namespace) -> dict[str, SpeculativeConfig]:
    known = METHODS | {"token_recycling": {"method": "token_recycling", **_tree_options(args)}}
    given = dict(map(_named_config, args.speculative_config))
    known.update(given)
    names = [name.strip() for name in args.methods.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"unknown method {name!r}, expected of {', '.join(known)}")
    if len(set(names)) < len(names):
        raise UsageError(f"--methods {args.methods} names a method twice")
    if unused := given.keys() - set(names):
        raise UsageError(
            f"--speculative-config {min(unused)} is not among --methods {args.methods}"
        )
    if (args.tree or args.scope) and ("token_recycling" not in set(names) - given.keys()):
        raise UsageError(
            "--tree and --scope belong to the method token_recycling, which is not run"
        )
    methods = {name: known[name] for name in names}
    if any(config and config.get("method") == "suffix" for config in methods.values()):
        _check_suffix()
    return methods


def _tree_options(args: argparse.Namespace) -> dict[str, Any]:
    if args.tree and args.tree.endswith(".json") and not Path(args.tree).is_file():
        raise UsageError(f"--tree {args.tree}: no such file")
    return {key: value for key in ("tree", "scope") if (value := getattr(args, key)) is not None}


def _check_suffix() -> None:
    if not find_spec("arctic_inference"):
        raise UsageError(
            "the method suffix needs vLLM's optional package: pip install arctic-inference==0.1.1"
        )


def _named_config(text: str) -> tuple[str, dict[str, Any]]:
    name, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[\w.-]+", name) or name == "none":
        raise UsageError(
            f"--speculative-config {text!r}: expected NAME=JSON, NAME of letters, digits and _.- "
            "and not `none`"
        )
    return name, _json_object(value, f"--speculative-config {name}")


def _json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{option}: not JSON ({error.msg}): {text}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option}: expected a JSON object, got {text}")
    return value
