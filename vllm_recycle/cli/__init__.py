"""The `vllm-recycle` command: one module per subcommand. Only the one that is called is imported.

A subcommand module exposes `add_parser(subparsers)`, which sets `func`, a function of the parsed
arguments that returns an exit status. Its errors for bad input are `UsageError` (status 2), for a
run that fails `RunError` (status 1): one line on stderr each, no traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import vllm_recycle

COMMANDS = ("check", "bench", "tree", "demo")
SIGPIPE_STATUS = 141  # what a shell reports of tools whose reader has gone


class UsageError(Exception):
    """Input that cannot be accepted: the message says what was given and what is accepted."""


class RunError(Exception):
    """A run that failed for a reason outside the command's arguments."""


def check_folder(model: str, option: str) -> None:
    """Raise UsageError for a model that can only be a folder, and is not there."""
    is_path = model.startswith(("/", ".", "~")) or (model.count("/") > 1 and "://" not in model)
    if is_path and not Path(model).exists():
        raise UsageError(
            f"{option}: no such folder {model}, expected a model directory or ORG/NAME on the hub"
        )


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


class ShowVersions(argparse.Action):
    """`--version`: of this package, and of vLLM, which is imported for it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        try:
            from vllm import __version__ as vllm_version
        except ImportError:
            vllm_version = "is not installed"
        print(f"vllm-recycle {vllm_recycle.__version__}, vllm {vllm_version}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = OneLineParser(
        prog="vllm-recycle", description="Train-free tree speculative decoding for vLLM."
    )
    parser.add_argument("--version", action=ShowVersions, nargs=0, help="ours and vLLM's")
    subparsers = parser.add_subparsers(dest="command", required=True)
    command = arguments[0] if arguments and arguments[0] in COMMANDS else None
    for name in COMMANDS if command is None else (command,):
        importlib.import_module(f"vllm_recycle.cli.{name}").add_parser(subparsers)
    args = parser.parse_args(arguments)
    try:
        status = args.func(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read the output, such as `head`, has enough. What is left of it must go somewhere,
        # or Python complains when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SIGPIPE_STATUS
    except (UsageError, RunError) as error:
        print(f"vllm-recycle {args.command}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print(f"vllm-recycle {args.command}: interrupted", file=sys.stderr)
        return 130
