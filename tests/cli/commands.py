"""Calls of `vllm-recycle`, and the embedded models and prompts."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/models/target"
DRAFT_MODEL = ROOT / "examples/models/draft"
PROMPTS = ROOT / "examples/prompts/gsm8k.jsonl"
EMBEDDED = f"--model={MODEL}"


def bench(*arguments: str, model: Path = MODEL, prompts: Path = PROMPTS) -> list[str]:
    return ["bench", f"--model={model}", f"--prompts={prompts}", *arguments]
