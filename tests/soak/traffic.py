"""What clients of a soak ask for: all sampling parameters, streams, answers nobody waits for."""

from __future__ import annotations

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
# Of the OpenAI API, and of vLLM's extension of it.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top-p and top-k": {"temperature": 1.0, "top_p": 0.9, "extra_body": {"top_k": 20}, "seed": 2},
    "min-p": {"temperature": 1.0, "extra_body": {"min_p": 0.1}, "seed": 3},
    "logit bias": {"logit_bias": {"300": 5, "7": -100}},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "repetition": {"extra_body": {"repetition_penalty": 1.3}},
    "bad words": {"extra_body": {"bad_words": ["the", "of"]}},
    "stop string": {"stop": ["."]},
    "at least": {"extra_body": {"min_tokens": 20}, "max_tokens": 24},
    "several": {"n": 2, "temperature": 1.0, "seed": 4},
    "logprobs": {"logprobs": 3},
    "adapter": {"model": ADAPTER},
    "sampling adapter": {"model": ADAPTER, "temperature": 0.7, "seed": 5},
    "hint": {"extra_body": {"vllm_xargs": {"hint": "The answer is that there are three of them."}}},
    "sampled with a hint": {
        "temperature": 0.8,
        "seed": 6,
        "extra_body": {"vllm_xargs": {"hint": "She has two apples, and he has none."}},
    },
    "opted out": {"extra_body": {"vllm_xargs": {"speculate": False}}},
    "JSON schema": {
        "extra_body": {"structured_outputs": {"json": SCHEMA}},
        "max_tokens": 48,
    },
    "choice": {"extra_body": {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}},
    "regex": {"extra_body": {"structured_outputs": {"regex": "[a-d]{4} [0-9]{3}"}}},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and how its client behaves."""

    kind: str
    prompt: str
    settings: dict[str, Any]

    @property
    def wants_adapter(self) -> bool:
        return self.settings.get("model") == ADAPTER

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
    for index in range(count):
        kind = list(KINDS)[index % len(KINDS)]
        prompt = " ".join(choose.sample(prompts, choose.choice([1, 1, 1, 3])))
        settings = {"max_tokens": choose.choice([8, 24, 64]), **KINDS[kind]}
        cases.append(Case(kind, prompt, settings))
    return cases
