"""Records what grown trees promised and gave on a real model's texts, for the simulator.

    python tests/core/record_traces.py MODEL OUTPUT.json

The model answers prompts greedily, in float32. At every token of an answer a tree is grown from
what was learnt of the tokens before it; recorded is, for some sizes, what its first nodes were said
to be worth together, and how many of them the answer went on with. The next answer starts with what
the last one left behind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from vllm_recycle.core.adjacency import AdjacencyMatrix, Ends
from vllm_recycle.core.grow import BEAM, LEVELS, TextEnds, grow
from vllm_recycle.core.learn import VerifiedStep, learn, seed
from vllm_recycle.core.token_recycling import TokenRecyclingState
from vllm_recycle.core.tree import Trees
from vllm_recycle.core.verification import WalkResult

PROMPTS = Path(__file__).parents[2] / "examples" / "prompts"
SIZES = (0, 1, 2, 5, 10, 20, 40, 80)
MAX_TOKENS = 96


def read_prompts() -> list[str]:
    chosen = []
    for name, indices in (("gsm8k", (3,)), ("humaneval", (5,)), ("spec_bench", (2, 60, 130, 200))):
        lines = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        for index in indices:
            row = json.loads(lines[index % len(lines)])
            chosen.append(" ".join((row.get("prompt") or row["turns"][0]).split(" ")[:200]))
    return chosen


def accepted(drafts: list[int], parents: list[int], answer: list[int]) -> list[int]:
    """How many tokens of the answer each size of the tree has on a path from its root."""
    at, depth, gains = 0, 0, []
    for size in SIZES:
        going = True
        while going:
            going = False
            for node in range(size):
                follows = depth < len(answer) and drafts[node] == answer[depth]
                if follows and parents[node + 1] == at:
                    at, depth, going = node + 1, depth + 1, True
                    break
        gains.append(depth)
    return gains


def record(
    state: TokenRecyclingState, prompt: list[int], answer: list[int], best: torch.Tensor
) -> Any:
    """Of one answer; `best` is int32 [tokens of the answer, k], the target's after each context."""
    matrix = state.matrix
    matrix.begin(0)
    only = torch.tensor([0])
    seed(matrix, 0, torch.tensor(prompt))
    said, given = [], []
    for place, token in enumerate(answer[:-1]):
        text = torch.tensor([prompt + answer[: place + 1]], dtype=torch.int32)
        end = len(prompt) + place
        walked = WalkResult(
            torch.zeros(1, 1, dtype=torch.int64),
            torch.tensor([[token]]),
            torch.ones(1, dtype=torch.int32),
        )
        root = torch.zeros(1, 1, dtype=torch.int64)
        known = (text[0, -2:-1].long(), torch.tensor([0, 1]), best[place : place + 1])
        step = VerifiedStep(only, root, *known, walked)
        learn(matrix, state.acceptance.counts, Ends(text, [end - 1]), step)
        texts = TextEnds(only, Ends(text, [end]), [LEVELS])
        limits = {"max_nodes": SIZES[-1], "beam": BEAM, "levels": LEVELS}
        growth = grow(matrix, state.acceptance.rates().float(), texts, **limits)
        trees = Trees.from_parents(growth.parents)
        sums = [0.0, *growth.worths[0].cumsum(0).tolist()]
        said.append([round(sums[size], 3) for size in SIZES])
        drafts, parents = growth.token_ids[0].tolist(), trees.parents[0].tolist()
        given.append(accepted(drafts, parents, answer[place + 1 :]))
    return {"worth": said, "accepted": given}


@torch.inference_mode()
def main(folder: str, output: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    matrix = AdjacencyMatrix(
        model.config.vocab_size, 8, contexts=(1, 2, 4, 16), slots=1 << 18, max_num_reqs=1
    )
    state = TokenRecyclingState(matrix)
    texts = []
    for prompt in read_prompts():
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        tokens = list(ids["input_ids"])
        made = model.generate(
            torch.tensor([tokens]), max_new_tokens=MAX_TOKENS, do_sample=False,
            repetition_penalty=1.0,
        )[0]  # fmt: skip
        logits = model(made[None]).logits[0, len(tokens) - 1 : -1]
        best = logits.topk(8, dim=-1).indices.to(torch.int32)
        texts.append(record(state, tokens, made[len(tokens) :].tolist(), best))
        print(texts[-1]["accepted"][::8])
    content = {"model": Path(folder).name, "sizes": SIZES, "texts": texts}
    Path(output).write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
