"""Calls of `vllm-recycle`, the embedded models and prompts, and workers that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_recycle.cli import main

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/models/target"
DRAFT_MODEL = ROOT / "examples/models/draft"
PROMPTS = ROOT / "examples/prompts/gsm8k.jsonl"
FAKE_WORKER = (str(Path(__file__).with_name("fake_worker.py")),)


def bench(*arguments: str, model: Path = MODEL, prompts: Path = PROMPTS) -> list[str]:
    return ["bench", "--model", str(model), "--prompts", str(prompts), *arguments]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a call that ends with status 2, before vLLM is imported."""
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code
    line = capsys.readouterr().err
    assert status == 2, line
    assert line.count("\n") == 1
    names = (arguments[0], " ".join(arguments[:2]))
    assert line.startswith(tuple(f"vllm-recycle {name}: error: " for name in names))
    return line
