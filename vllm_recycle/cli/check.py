"""`vllm-recycle check`: whether a model, vLLM's flags and this machine are supported.

    vllm-recycle check MODEL
    vllm-recycle check MODEL --max-num-seqs 64 --speculative-config '{"method": "ouroboros", ...}'
    vllm-recycle check --build

It makes the configuration that `vllm serve` would make (`integration.start.config`), and
reports what that refuses. It loads no weights, and does not look at what only a running engine
knows, such as the memory that is left. On CPU it compiles the kernels that an engine compiles at
its first start, where the package has none for the CPU; with `--build` it says where they lie.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
from importlib.util import find_spec
from typing import Any

from vllm_recycle.cli import OneLineParser, UsageError, check_folder

DEFAULT_CONFIG = {"method": "token_recycling"}
# By module: what it is for, and how to get it.
OPTIONAL_MODULES = {
    "ray": ("--distributed-executor-backend ray", "pip install ray"),
    "arctic_inference": ("vLLM's `suffix` in bench", "`make suffix`"),
}
NAME_WIDTH = 18


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `check` to the command."""
    parser = subparsers.add_parser(
        "check", help="whether a model, vLLM's flags and this machine are supported"
    )
    parser.add_argument(
        "--build", action="store_true", help="compile the CPU kernels ahead; MODEL may be left out"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as for `vllm serve`")
    parser.add_argument(
        "flags",
        nargs=argparse.REMAINDER,
        metavar="FLAGS",
        help="those of `vllm serve`; without --speculative-config it is token_recycling's",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Say what is supported and what is there.

    The status is 1 where an engine would not start, or not draft, or kernels to build are not kept.
    """
    if args.model is None and not args.build:
        raise UsageError("expected a MODEL, or --build")
    # Before vLLM is imported, which logs before it has read its own level.
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(level.upper())
    facts = _build() if args.build else {}
    try:
        if args.model is not None:
            facts |= _describe(_make_config(args.model, args.flags))
    except (ImportError, OSError, RuntimeError, UsageError, ValueError) as error:
        facts |= {"refused": _reason(error)}
    for name, fact in (facts | _optional_parts()).items():
        print(f"{name:{NAME_WIDTH}}{fact}")
    return 1 if facts.keys() & {"refused", "not built"} else 0


def _build() -> dict[str, str]:
    """Where the compiled kernels lie, or why they do not."""
    from vllm_recycle.kernels.cpu.build import find_or_build

    build = find_or_build()
    name = "not built" if build.path is None else "kernels"
    messages = [str(build.path), *build.problems] if build.path else build.problems
    return {name: "; ".join(messages)}


def _make_config(model: str, flags: list[str]) -> Any:
    """The configuration that `vllm serve` would make, or the error with which it would not."""
    from vllm_recycle.integration.start.versions import check_vllm_version

    check_vllm_version()  # before what another version may not have
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_recycle.integration.requests.parameters import is_ours
    from vllm_recycle.integration.start.environment import read_variable

    class Parser(OneLineParser, FlexibleArgumentParser):
        pass

    args = make_arg_parser(Parser(prog="vllm-recycle check")).parse_args([model, *flags])
    args.model = args.model_tag
    if args.speculative_config is None and args.spec_method is None:
        args.speculative_config = read_variable() or DEFAULT_CONFIG
    check_folder(args.model, "MODEL")
    if isinstance(args.speculative_config, dict):
        check_folder(str(args.speculative_config.get("model")), "model of --speculative-config")
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )
    if config.speculative_config is None:
        raise RuntimeError("no C++ kernels, so that an engine decodes without drafts: install g++")
    if not is_ours(config.speculative_config):
        raise ValueError(
            f"--speculative-config: got method {config.speculative_config.method!r}, expected one "
            "of this package"
        )
    return config


def _describe(config: Any) -> dict[str, str]:
    """What is supported, and with which tables."""
    import vllm
    from vllm.platforms import current_platform

    from vllm_recycle.integration.options import settings_of
    from vllm_recycle.integration.options.base import HOSTED_TRUNK
    from vllm_recycle.integration.start.refusals import other_token_ids

    options = settings_of(config).options
    num_bytes = sum(tensor.nbytes for tensor in options.make_state(config, "meta").tensors.values())
    tables = f"{num_bytes:,} bytes on each rank, beside weights and KV cache"
    if options.state_file is not None:
        tables += f", and twice as many on the host of the first rank for {options.state_key}"
    warning = other_token_ids(config)
    trees = "grown trees" if options.is_dynamic else f"tree {options.load_tree().name}"
    drafts = f"{trees}, at most {options.num_nodes} nodes"
    if options.source == HOSTED_TRUNK:
        method = config.speculative_config.method
        drafts += f"; trunks of at most {options.trunk_length} tokens by {method}"
    return {
        "supported": f"{config.model_config.model} with {options.method}",
        "vllm": f"{vllm.__version__} on {current_platform.device_type}",
        "drafts": drafts,
        "tables": tables,
        **({"warning": warning} if warning else {}),
    }


def _optional_parts() -> dict[str, str]:
    """Which optional parts are installed."""
    from vllm_recycle.kernels.cpu.build import compilers

    parts = {"g++": next(map(shlex.join, compilers([])), "missing, to compile CPU kernels")}
    for name, (use, command) in OPTIONAL_MODULES.items():
        state = "found" if find_spec(name) is not None else f"missing ({command})"
        parts[name] = f"{state}, for {use}"
    return parts


def _reason(error: Exception) -> str:
    """What an error says, in one line."""
    from pydantic import ValidationError

    message = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return " ".join(message.split()).removeprefix("Value error, ") or type(error).__name__
