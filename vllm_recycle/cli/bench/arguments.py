"""The arguments of `bench`: what they are, and what their values must be."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from vllm_recycle.cli import UsageError, check_folder

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add what an engine runs: models, prompts and how."""
    parser.add_argument("--model", required=True, help="a model directory, or ORG/NAME on the hub")
    parser.add_argument(
        "--draft-model",
        metavar="DIR",
        help="a smaller model with the same vocabulary, for draft_model and ouroboros",
    )
    parser.add_argument(
        "--prompts",
        required=True,
        type=Path,
        dest="prompts_path",
        metavar="PROMPTS",
        help="JSON lines with `prompt` (a string) or `turns` (a list; without --chat only the "
        "first), and perhaps `category`, `json_schema`, which the answers then follow, and `hint`",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="put each prompt into the model's chat template; several `turns` are run one after "
        "the other, each answer going into the next",
    )
    parser.add_argument("--num-prompts", type=positive, help="only the first N prompts")
    parser.add_argument("--max-tokens", type=positive, default=128, help="default: %(default)s")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="default: %(default)s")
    parser.add_argument(
        "--engine-args",
        default="{}",
        metavar="JSON",
        help="further arguments of vllm.LLM for every engine, "
        "for example '{\"max_model_len\": 1024}'",
    )
    parser.add_argument(
        "--max-engines",
        type=positive,
        metavar="N",
        help="engines alive at once, where memory is short: each takes its weights and 1 GiB of KV "
        "cache (kv_cache_memory_bytes of --engine-args); only these are interleaved; default: all",
    )


def positive(text: str) -> int:
    """An argument type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


def temperature(text: str) -> float:
    """An argument type: a number from 0 to 2."""
    try:
        if 0 <= (value := float(text)) <= 2:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 0 to 2")


def numbers(text: str) -> tuple[int, ...]:
    """An argument type: integers of at least 1, with commas between."""
    if not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected integers of at least 1, for example 4,6,12"
        )
    return tuple(dict.fromkeys(map(int, text.split(","))))


def json_object(text: str, option: str) -> dict[str, Any]:
    """The JSON object that an option's value must be."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{option}: not JSON ({error.msg}): {text}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option}: expected a JSON object, got {text}")
    return value


def check_model(model: str, option: str) -> None:
    check_folder(model, option)
    if Path(model).exists() and not (Path(model) / "config.json").is_file():
        raise UsageError(f"{option}: no config.json in {model}, expected a model directory")


def check_vocabularies(model: str, draft_model: str) -> None:
    """Compare the two where both models are directories; vLLM checks others."""
    vocab_size, draft_vocab_size = _vocab_size(model), _vocab_size(draft_model)
    if vocab_size and draft_vocab_size and draft_vocab_size != vocab_size:
        raise UsageError(
            f"--draft-model {draft_model}: a vocabulary of {draft_vocab_size}, expected the "
            f"{vocab_size} of --model {model}"
        )


def _vocab_size(model: str) -> int | None:
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    config = json_object(path.read_text(encoding="utf-8"), str(path))
    return config.get("text_config", config).get("vocab_size")
