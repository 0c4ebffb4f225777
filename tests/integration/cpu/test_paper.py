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
from transformers import DynamicCache
from vllm import SamplingParams

from tests.core.slow_ouroboros import Rows, load
from tests.integration.engines import EXAMPLES, TARGET, counter, engine, read_prompts

K = 8
MAX_TOKENS = 64
# GSM8K and HumanEval.
PROMPTS = [prompt for i, prompt in enumerate(read_prompts(12, max_words=1000)) if i % 3 < 2]


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
        self.nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
        self.num_steps = self.num_accepted = 0

    @property
    def mean_accepted(self) -> float:
        """Tokens of a step that has a draft."""
        return 1 + self.num_accepted / self.num_steps

    def generate(self, prompt: list[int]) -> list[int]:
        self.cache = DynamicCache()
        text = [*prompt, *self.step(Rows(prompt), [], MAX_TOKENS)]
        while (left := len(prompt) + MAX_TOKENS - len(text)) > 0:
            rows = Rows(text)
            paths = self.fill(rows)
            emitted = self.step(rows, paths, left)
            if left > 1 and paths:
                self.num_steps += 1
                self.num_accepted += len(emitted) - 1
            text += emitted
        return text[len(prompt) :]

    def fill(self, rows: Rows) -> list[list[int]]:
        """Add a row for each node that has a token, and return the rows down to each of them.

        A token is that of the node's rank among the successors of its parent's token.
        """
        last = rows.text_length - 1
        paths = {0: [last]}
        for node, (parent, rank) in enumerate(self.nodes, 1):
            path = paths.get(parent, [])
            known = self.successors.get(rows.token_ids[path[-1]], []) if path else []
            if rank < len(known):
                row = rows.add(known[rank], position=last + len(path), sees=path[1:])
                paths[node] = [*path, row]
        return [path[1:] for path in paths.values() if path[1:]]

    def step(self, rows: Rows, paths: list[list[int]], left: int) -> list[int]:
        """Verify the rows below the last token; returns what follows, at most so many tokens."""
        last, known = rows.text_length - 1, self.cache.get_seq_length()
        logits = rows.logits(self.model, known, past_key_values=self.cache)
        self.cache.crop(rows.text_length - self.cache.get_seq_length())
        successors = [[]] * known + logits.topk(K).indices.tolist()
        best = [tokens[0] if tokens else -1 for tokens in successors]
        accepted = rows.longest_walk(last, paths, best)[:left]
        written = [*range(last, len(best)), *(accepted if self.accepted_last else ())]
        self.successors |= {rows.token_ids[row]: successors[row] for row in written}
        return [best[row] for row in accepted]


def test_the_paper_preset_accepts_what_the_papers_method_accepts():
    tokens = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    model = load(TARGET)
    papers, ours = (Paper(model, accepted_last=accepted_last) for accepted_last in (False, True))
    with engine({"method": "token_recycling", "preset": "paper"}) as llm:
        for prompt in PROMPTS:
            [result] = llm.generate([prompt], tokens, use_tqdm=False)
            for plain in (papers, ours):
                said = plain.generate(list(result.prompt_token_ids))
                assert said == list(result.outputs[0].token_ids)
        names = ("num_drafts", "num_accepted_tokens")
        num_steps, num_accepted = (counter(llm, f"spec_decode_{name}") for name in names)
    accepted = 1 + num_accepted / num_steps
    assert accepted == pytest.approx(ours.mean_accepted, rel=0.01)
    assert 0.99 * papers.mean_accepted < accepted < 1.08 * papers.mean_accepted
