"""Roll-outs whose tokens are drafted: GRPO on GSM8K questions, in one process on a CPU.

    make model
    python examples/rollouts.py --model examples/models/smollm2-135m-instruct
    python examples/rollouts.py --model DIR --prompts 4 --samples 8 --epochs 3 --method none

Each step asks vLLM for several answers to each of a few questions, at temperature 1. An answer is
rewarded if its last number is the one that most answers to its question end with, so that no labels
are needed. Then transformers takes one step of GRPO, and vLLM's engine gets the new weights.

The owner of a roll-out is its question: drafts come from earlier answers to the same question, and
not from those to others. Samples are those of vLLM without speculation while weights stay as they
are. After each step a line says what was drafted and how long it took.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

EXAMPLES = Path(__file__).parent
METHODS = {
    "none": None,
    "suffix": {"method": "suffix"},
    "token_recycling": {"method": "token_recycling"},
}
CLIP = 0.2  # of the ratio of probabilities, on both sides


@dataclass(frozen=True)
class Answer:
    """One sample.

    Attributes:
        prompt_ids, token_ids: of the question, and of the answer.
        logprobs: that the engine sampled with, float32 [answer].
        text: of the answer.

    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: torch.Tensor
    text: str


class Sampler:
    """An engine that answers questions several times, and takes new weights.

    Args:
        model: a folder.
        method: its speculative configuration, None for none.
        samples, max_tokens: answers to each question, and their length.

    """

    def __init__(
        self, model: str, method: dict[str, Any] | None, samples: int, max_tokens: int
    ) -> None:
        self.has_owners = method is not None and method["method"] == "token_recycling"
        self.samples, self.max_tokens = samples, max_tokens
        # Weights are passed as they are, so the engine has to be in this process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self.llm = LLM(
            model,
            speculative_config=method,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=32,
            kv_cache_memory_bytes=1 << 30,
            logprobs_mode="processed_logprobs",
            disable_log_stats=False,
            enforce_eager=True,
        )

    def answers(self, questions: Sequence[tuple[int, str]], seed: int) -> list[list[Answer]]:
        """Of each question, its number and text, so many samples."""
        params = [
            SamplingParams(
                n=self.samples,
                temperature=1.0,
                seed=seed * 1000 + number,
                max_tokens=self.max_tokens,
                logprobs=0,
                extra_args={"owner": number} if self.has_owners else None,
            )
            for number, _ in questions
        ]
        texts = [self.prompt_of(text) for _, text in questions]
        outputs = self.llm.generate(texts, params, use_tqdm=False)
        return [
            [answer_of(output.prompt_token_ids, one) for one in output.outputs]
            for output in outputs
        ]

    def prompt_of(self, question: str) -> str:
        """The question in the model's chat template, where it has one."""
        tokenizer = self.llm.get_tokenizer()
        if not tokenizer.chat_template:
            return question
        messages = [{"role": "user", "content": question}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take new weights, by their names in a checkpoint."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.llm.reset_prefix_cache()

    def counted(self) -> Counter[str]:
        """See `counted`."""
        return counted(self.llm)


def counted(llm: LLM) -> Counter[str]:
    """Tokens behind the first of each answer, and the calls of the target that gave them."""
    found = {metric.name.removeprefix("vllm:"): metric for metric in llm.get_metrics()}
    first = found["time_to_first_token_seconds"].count
    calls = found["inter_token_latency_seconds"].count
    return Counter(tokens=found["generation_tokens"].value - first, calls=calls)


def answer_of(prompt_ids: Sequence[int], output: Any) -> Answer:
    """One of vLLM's outputs."""
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    logprobs = torch.tensor([step[token_id].logprob for token_id, step in pairs])
    return Answer([*prompt_ids], [*output.token_ids], logprobs, output.text)


def rewards(answers: Sequence[Answer]) -> torch.Tensor:
    """1 for each answer that ends with the number that most of them end with, else 0."""
    numbers = [re.findall(r"-?\d[\d,]*\.?\d*", answer.text) for answer in answers]
    last = [found[-1].strip(",.").replace(",", "") if found else None for found in numbers]
    votes = Counter(number for number in last if number is not None)
    best = max(votes, key=lambda number: votes[number], default=None)
    return torch.tensor([float(best is not None and number == best) for number in last])


def losses(policy: Any, answers: Sequence[Answer], of_each: torch.Tensor) -> Iterator[torch.Tensor]:
    """The parts of GRPO's loss, one for each answer that is better or worse than the others."""
    advantages = (of_each - of_each.mean()) / (of_each.std() + 1e-4)
    for answer, advantage in zip(answers, advantages.tolist(), strict=True):
        if advantage and answer.token_ids:
            token_ids = torch.tensor([answer.prompt_ids + answer.token_ids])
            logits = policy(token_ids).logits[0, len(answer.prompt_ids) - 1 : -1]
            chosen = torch.tensor(answer.token_ids)[:, None]
            logprobs = logits.log_softmax(-1).gather(1, chosen)[:, 0]
            ratio = (logprobs - answer.logprobs).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            yield -torch.minimum(ratio * advantage, clipped * advantage).mean()


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=str(EXAMPLES / "models/target"))
    parser.add_argument("--method", choices=METHODS, default="token_recycling")
    parser.add_argument("--prompts", type=int, default=4, help="questions")
    parser.add_argument("--batch", type=int, default=2, help="questions of a step")
    parser.add_argument("--samples", type=int, default=8, help="answers to a question")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    return parser


def batches(args: argparse.Namespace) -> Iterator[tuple[int, list[tuple[int, str]]]]:
    """The epoch and the questions of each step."""
    lines = (EXAMPLES / "prompts/gsm8k.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [(number, json.loads(line)["prompt"]) for number, line in enumerate(lines)]
    for epoch in range(args.epochs):
        for first in range(0, args.prompts, args.batch):
            yield epoch, questions[first : min(first + args.batch, args.prompts)]


class Trainer:
    """The policy, and what trains it."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=args.learning_rate)

    @property
    def weights(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.policy.state_dict().items()]

    def step(self, groups: Sequence[Sequence[Answer]]) -> float:
        """One step of GRPO on answers to some questions; returns the mean reward."""
        of_groups = [rewards(group) for group in groups]
        self.optimizer.zero_grad()
        for group, of_each in zip(groups, of_groups, strict=True):
            for part in losses(self.policy, group, of_each):
                (part / sum(map(len, groups))).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        return torch.cat(of_groups).mean().item()


def say(epoch: int, reward: float, counted: Counter[str], sampling: float, training: float) -> None:
    """Print a line about a step; `counted` is of its roll-outs, times are in seconds."""
    rate = counted["tokens"] / max(1, counted["calls"])
    print(
        f"epoch {epoch}: reward {reward:.2f}, {rate:.2f} tokens a call, "
        f"sampling took {sampling:.1f} s, training {training:.1f} s",
        flush=True,
    )


def main() -> None:
    args = make_parser(__doc__.partition("\n")[0]).parse_args()
    sampler = Sampler(args.model, METHODS[args.method], args.samples, args.max_tokens)
    trainer = Trainer(args)
    for epoch, questions in batches(args):
        before, started = sampler.counted(), time.perf_counter()
        groups = sampler.answers(questions, seed=epoch)
        sampled, counted = time.perf_counter(), sampler.counted() - before
        reward = trainer.step(groups)
        sampler.load(trainer.weights)
        say(epoch, reward, counted, sampled - started, time.perf_counter() - sampled)


if __name__ == "__main__":
    main()
