"""Records what rounds of Ouroboros gave on texts of the embedded pair, for the simulator.

    PYTHONPATH=tests/core python tests/core/record_drafts.py OUTPUT.json

The slow Ouroboros decodes prompts greedily, in float32, with the sizes that a GPU has for some
requests at once. Recorded is, at every token of an answer, what the round that it was in
accepted: of half the tree, and of the whole one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from record_traces import read_prompts
from slow_ouroboros import SlowOuroboros

MODELS = Path(__file__).parents[2] / "examples" / "models"
# As `options.ouroboros.SIZES`, window and guesses halved twice.
SIZES = {"gamma": 12, "window": 5, "guesses": 5, "phrase_length": 7, "branches": 3}
FORWARDS = 4
NODES = 30
MAX_TOKENS = 40


def record(ouroboros: SlowOuroboros, prompt: list[int]) -> list[list[int]]:
    """Of one answer, by token: accepted of no nodes, of half of them, and of all."""
    sequence, rows = ouroboros.begin(prompt), []
    while len(rows) < MAX_TOKENS:
        done = ouroboros.step(sequence)
        agreeing = 0
        while done.trunk[agreeing : agreeing + 1] == done.new_tokens[agreeing : agreeing + 1]:
            agreeing += 1
        accepted = len(done.new_tokens) - 1
        # Half of the nodes are the trunk, and a few of a branch.
        rows += [[0, min(agreeing, accepted), accepted]] * len(done.new_tokens)
    return rows


def main(output: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, draft = (
        AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()
        for name in ("target", "draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    prompts = [tokenizer.encode(prompt)[:160] for prompt in read_prompts()[:4]]
    ouroboros = SlowOuroboros(target, draft, max_forwards=FORWARDS, **SIZES)
    texts = [{"accepted": record(ouroboros, prompt)} for prompt in prompts]
    content = {"models": ["target", "draft"], "sizes": [0, NODES // 2, NODES], "texts": texts}
    Path(output).write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
