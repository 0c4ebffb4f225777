"""TRL's own trainer, GRPO with vLLM in its process, whose roll-outs are drafted.

    make trl
    export PYTHONPATH=.venv/trl:.venv/vllm-0.31.0
    .venv/bin/python examples/trl_grpo.py
    .venv/bin/python examples/trl_grpo.py --method none

TRL makes the engine itself, and has no argument for speculation there. So the environment variable
VLLM_RECYCLE turns the method on, and TRL need not know of it. Answers are rewarded as in
`rollouts.py`. After each step a line says what was drafted and how long the step took.

Two changes of TRL are for this example alone: `CountingLLM` counts tokens, and `pass_weights` is
for CPUs. TRL writes new weights into the layers of vLLM. On a CPU vLLM has packed those, and TRL's
way fails there, with speculation or without.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections import Counter
from itertools import groupby
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from rollouts import EXAMPLES, METHODS, counted, make_parser, rewards
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from vllm import LLM

CountingLLM = functools.partial(LLM, disable_log_stats=False, dtype="float32")


def pass_weights(generation: Any) -> None:
    """Give the engine the trainer's weights, by vLLM's own function.

    Tied weights go by both names: on a CPU vLLM packs each for itself.
    """
    weights = [*generation.model.state_dict().items()]
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
    generation.llm.reset_prefix_cache()


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Of each answer; those to one question follow each other."""
    pairs = zip(prompts, completions, strict=True)
    groups = [
        [SimpleNamespace(text=text) for _, text in group]
        for _, group in groupby(pairs, key=lambda pair: pair[0])
    ]
    return [one for group in groups for one in rewards(group).tolist()]


class SayWhatWasDrafted(TrainerCallback):
    """A line after each step."""

    llm: LLM
    counted: Counter[str]
    started: float

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.counted, self.started = counted(self.llm), time.perf_counter()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        step = counted(self.llm) - self.counted
        rate, seconds = step["tokens"] / max(1, step["calls"]), time.perf_counter() - self.started
        print(f"step {state.global_step}: {rate:.2f} tokens a call, {seconds:.1f} s", flush=True)


def make_trainer(args: Any, folder: str) -> GRPOTrainer:
    """A trainer with its engine; `args` are those of `rollouts.py`."""
    os.environ["VLLM_RECYCLE"] = json.dumps(METHODS[args.method])  # "null" turns it off
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else a part of the memory
    vllm_generation.LLM = CountingLLM
    lines = (EXAMPLES / "prompts/gsm8k.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[: args.prompts]]
    watch = SayWhatWasDrafted()
    trainer = GRPOTrainer(
        args.model,
        reward,
        args=GRPOConfig(
            folder,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_max_model_length=1024,
            num_generations=args.samples,
            per_device_train_batch_size=args.batch * args.samples,
            max_completion_length=args.max_tokens,
            num_train_epochs=args.epochs,
            learning_rate=args.learning_rate,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[watch],
    )
    generation = trainer.vllm_generation
    generation.sync_weights = functools.partial(pass_weights, generation)
    watch.llm = generation.llm
    return trainer


def main() -> None:
    args = make_parser(__doc__.partition("\n")[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(args, folder).train()


if __name__ == "__main__":
    main()
