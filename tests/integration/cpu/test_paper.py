"""The preset `paper` accepts what Token Recycling accepts as the paper has it (2408.08696).

The method is written here once more, on a model of transformers, and plainly: one sequence at a
time, one matrix of the successors of single tokens that starts empty, the paper's tree filled level
by level, and the top-k of every row written (sections 3.1 and 3.2).

Where a token comes twice among the rows of a step the paper keeps the last row. This package keeps
the row that was accepted, if one was, which accepts somewhat more; both are written here.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from engines import EXAMPLES, TARGET, counter, engine
from transformers import AutoModelForCausalLM, DynamicCache
from vllm import SamplingParams

K = 8
MAX_TOKENS = 64
NUM_PROMPTS = 4  # of each kind
KINDS = ("humaneval", "gsm8k")


class Paper:
    """The matrix and the tree, and the model that they draft for.

    Args:
        model: the target.
        accepted_last: whether accepted rows are written behind all others.

    """

    def __init__(self, model: Any, *, accepted_last: bool) -> None:
        self.model, self.accepted_last = model, accepted_last
        self.successors: dict[int, list[int]] = {}
        path = EXAMPLES.parent / "vllm_recycle" / "core" / "trees" / "paper-80.json"
        nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
        self.parents = [0, *(parent for parent, _ in nodes)]
        self.ranks = [0, *(rank for _, rank in nodes)]
        self.num_steps = self.num_accepted = 0

    @property
    def mean_accepted(self) -> float:
        """Tokens of a step that has a draft."""
        return 1 + self.num_accepted / self.num_steps

    @torch.inference_mode()
    def generate(self, prompt: list[int]) -> list[int]:
        cache, text = DynamicCache(), [*prompt]
        text += self.step(cache, text, [None], MAX_TOKENS)
        while (left := len(prompt) + MAX_TOKENS - len(text)) > 0:
            drafts = self.fill(text[-1])
            emitted = self.step(cache, text, drafts, left)
            if left > 1 and any(token is not None for token in drafts[1:]):
                self.num_steps += 1
                self.num_accepted += len(emitted) - 1
            text += emitted
        return text[len(prompt) :]

    def fill(self, last: int) -> list[int | None]:
        """The token of each row: that of the rank among the successors of its parent's token."""
        tokens: list[int | None] = [last]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            above = tokens[parent]
            known = [] if above is None else self.successors.get(above, [])
            tokens.append(known[rank] if rank < len(known) else None)
        return tokens

    def step(
        self, cache: DynamicCache, text: list[int], drafts: list[int | None], left: int
    ) -> list[int]:
        """Verify the rows below the last token; returns what follows, at most so many tokens."""
        known, nodes = cache.get_seq_length(), range(1, len(drafts))
        head, paths = len(text) - known, {0: [0]}
        for row in nodes:
            paths[row] = [*paths[self.parents[row]], row]
        first = head - 1  # the root is the last row of the head
        mask = torch.full((head + len(nodes), len(text) + len(nodes)), float("-inf"))
        mask[:head, : len(text)] = mask[:head, : len(text)].triu(known + 1)
        for row in nodes:
            mask[first + row, : len(text)] = 0
            mask[first + row, [len(text) - 1 + above for above in paths[row][1:]]] = 0
        depths = [len(paths[row]) - 1 for row in nodes]
        positions = [*range(known, len(text)), *(len(text) - 1 + depth for depth in depths)]
        tokens = [*text[known:], *(token or 0 for token in drafts[1:])]
        logits = self.model(
            torch.tensor([tokens]),
            attention_mask=mask[None, None],
            position_ids=torch.tensor([positions]),
            past_key_values=cache,
        ).logits[0, first:]
        cache.crop(len(text) - cache.get_seq_length())
        best = logits.argmax(dim=-1).tolist()
        row, emitted, accepted = 0, [best[0]], [0]
        while len(emitted) < left:
            below = [n for n in nodes if self.parents[n] == row and drafts[n] == best[row]]
            if not below:
                break
            row = below[0]
            emitted.append(best[row])
            accepted.append(row)
        successors = logits.topk(K).indices.tolist()
        for row in [*range(len(drafts)), *(accepted if self.accepted_last else ())]:
            token = text[-1] if row == 0 else drafts[row]
            if token is not None:
                self.successors[token] = successors[row]
        return emitted


def read_prompts() -> list[str]:
    prompts = []
    for kind in KINDS:
        lines = (EXAMPLES / "prompts" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines[:NUM_PROMPTS]]
        prompts += [row.get("prompt") or row["turns"][0] for row in rows]
    return prompts


def test_the_paper_preset_accepts_what_the_papers_method_accepts():
    tokens = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    papers, ours = (Paper(model, accepted_last=accepted_last) for accepted_last in (False, True))
    with engine({"method": "token_recycling", "preset": "paper"}) as llm:
        for prompt in read_prompts():
            [result] = llm.generate([prompt], tokens, use_tqdm=False)
            for plain in (papers, ours):
                said = plain.generate(list(result.prompt_token_ids))
                assert said == list(result.outputs[0].token_ids)
        names = ("num_drafts", "num_accepted_tokens")
        num_steps, num_accepted = (counter(llm, f"spec_decode_{name}") for name in names)
    accepted = 1 + num_accepted / num_steps
    assert accepted == pytest.approx(ours.mean_accepted, rel=0.01)
    assert 0.99 * papers.mean_accepted < accepted < 1.08 * papers.mean_accepted
