"""Prompt files: JSON lines, each a text or the user's turns of a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_recycle.cli import UsageError


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, turn by turn: each answer precedes the next turn.

    Attributes:
        turns: at least one; more than one only where they are put into a chat template.
        category: what the file calls its kind, if anything.
        json_schema: that each answer has to follow, if any.
        hint: what the answers may say, if anything; for the method `hints`.
    """

    turns: tuple[str, ...]
    category: str | None = None
    json_schema: Mapping[str, Any] | None = None
    hint: str | None = None


def read_prompts(path: Path, *, chat: bool = False) -> tuple[Prompt, ...]:
    """The prompts of a JSON lines file, in file order; blank lines are skipped.

    Turns behind the first are for `chat` alone. Raises UsageError naming a line that is no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path} cannot be read: {error}") from error
    prompts = tuple(
        _prompt(line, f"{path}, line {number}", chat=chat)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not prompts:
        raise UsageError(f"{path} has no prompts, expected one JSON object a line")
    return prompts


def has_chat_template(model: str, engine_args: Mapping[str, Any] | None = None) -> bool:
    """Whether the tokenizer that an engine with these arguments has for a model has one.

    Raises UsageError if it cannot be read.
    """
    from transformers import AutoTokenizer

    kwargs = engine_args or {}
    tokenizer = kwargs.get("tokenizer") or model
    names = {"revision": "tokenizer_revision", "trust_remote_code": "trust_remote_code"}
    options = {key: kwargs[name] for key, name in names.items() if kwargs.get(name) is not None}
    try:
        return AutoTokenizer.from_pretrained(tokenizer, **options).chat_template is not None
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"the tokenizer of {tokenizer} cannot be read: {reason}") from error


def _prompt(line: str, source: str, *, chat: bool) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{source}: not JSON ({error.msg})") from error
    if not isinstance(row, dict) or not {"prompt", "turns"} & row.keys():
        raise UsageError(f"{source}: neither `prompt` nor `turns`, expected one of them")
    turns: Any = [row["prompt"]] if "prompt" in row else row["turns"]
    if not (isinstance(turns, list) and turns and all(isinstance(t, str) and t for t in turns)):
        raise UsageError(
            f"{source}: `prompt` must be a string, `turns` a list of strings, not empty"
        )
    fields = (("category", str), ("json_schema", dict), ("hint", str))
    for key, kind in fields:
        if (value := row.get(key)) is not None and not isinstance(value, kind):
            expected = "a string" if kind is str else "an object"
            raise UsageError(f"{source}: `{key}` must be {expected}, got {json.dumps(value)}")
    turns = turns if chat else turns[:1]
    return Prompt(tuple(turns), *(row.get(key) for key, _ in fields))
