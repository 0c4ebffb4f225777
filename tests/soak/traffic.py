"""What clients of a soak ask for: all sampling parameters, streams, answers nobody waits for."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

from tests.integration.engines import read_prompts

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"enum": [1, 2, 3]}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
ADAPTER = "adapter"  # a LoRA adapter of the model


def vllms(**given: Any) -> dict[str, Any]:
    """Parameters of vLLM's extension of the OpenAI API."""
    return {"extra_body": given}


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top-p and top-k": {"temperature": 1.0, "top_p": 0.9, "seed": 2} | vllms(top_k=20),
    "min-p": {"temperature": 1.0, "seed": 3} | vllms(min_p=0.1),
    "logit bias": {"logit_bias": {"300": 5, "7": -100}},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "repetition": vllms(repetition_penalty=1.3),
    "bad words": vllms(bad_words=["the", "of"]),
    "stop string": {"stop": ["."]},
    "at least": {"max_tokens": 24} | vllms(min_tokens=20),
    "several": {"n": 2, "temperature": 1.0, "seed": 4},
    "logprobs": {"logprobs": 3},
    "adapter": {"model": ADAPTER},
    "sampling adapter": {"model": ADAPTER, "temperature": 0.7, "seed": 5},
    "hint": vllms(vllm_xargs={"hint": "The answer is that there are three of them."}),
    "sampled with a hint": {"temperature": 0.8, "seed": 6}
    | vllms(vllm_xargs={"hint": "She has two apples, and he has none."}),
    "opted out": vllms(vllm_xargs={"speculate": False}),
    "JSON schema": {"max_tokens": 48} | vllms(structured_outputs={"json": SCHEMA}),
    "choice": vllms(structured_outputs={"choice": ["yes", "no", "perhaps"]}),
    "regex": vllms(structured_outputs={"regex": "[a-d]{4} [0-9]{3}"}),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and how its client behaves."""

    kind: str
    prompt: str
    settings: dict[str, Any]

    def ask(self, server: Any, *, stream: bool = False) -> list[str]:
        """The texts of the answer; through a stream they are put together here."""
        if not stream:
            return [choice.text for choice in server.complete(self.prompt, **self.settings).choices]
        texts = [""] * self.settings.get("n", 1)
        for chunk in server.complete(self.prompt, stream=True, **self.settings):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        return texts

    def abort(self, server: Any) -> None:
        """Leave after the first token."""
        stream = server.complete(self.prompt, stream=True, **self.settings, timeout=120)
        next(iter(stream), None)
        stream.close()


def make_cases(count: int) -> list[Case]:
    """Requests of all kinds in turn, with prompts of mixed lengths."""
    choose = random.Random(0)
    prompts = read_prompts(40)
    cases = []
    for _, (kind, given) in zip(range(count), itertools.cycle(KINDS.items()), strict=False):
        prompt = " ".join(choose.sample(prompts, choose.choice([1, 1, 1, 3])))
        cases.append(Case(kind, prompt, {"max_tokens": choose.choice([8, 24, 64]), **given}))
    return cases
