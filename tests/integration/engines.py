"""Real vLLM engines in this process, on the embedded target, in float32 so that outputs compare."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGET = str(EXAMPLES / "models" / "target")
PROMPT_KINDS = ("gsm8k", "humaneval", "spec_bench")
TOKEN_RECYCLING = {"method": "token_recycling"}
# Rows that cost nothing, here and below: trees of one size whatever they are worth, so that what is
# slow to draft is drafted.
GROWN = {**TOKEN_RECYCLING, "row_cost": 0}
PAPER = {**TOKEN_RECYCLING, "tree": "paper-80", "row_cost": 0}
# Trees along the draft model's trunk.
TRUNK = {"method": "ouroboros", "model": str(EXAMPLES / "models" / "draft"), "row_cost": 0}
# Trees along the chain of a head that vLLM runs, see `conftest`.
HEAD = Path(tempfile.gettempdir()) / f"vllm-recycle-{os.getpid()}" / "eagle"
HOSTED = {**GROWN, "trunk": {"method": "eagle", "model": str(HEAD)}}
# As published, also with few rows, for tests that make many steps.
PUBLISHED = {"method": "ouroboros", "model": TRUNK["model"], "preset": "paper"}
OUROBOROS = {**PUBLISHED, "gamma": 2, "window": 2, "guesses": 2, "phrase_length": 4}
OUROBOROS["max_forwards"] = 1
SMALL_OUROBOROS = {
    **PUBLISHED,
    "gamma": 5,
    "window": 4,
    "guesses": 3,
    "phrase_length": 4,
    "branches": 2,
    "max_forwards": 5,
    "row_cost": 0,
}
# Less than two prompts, or two trees: prompts come in chunks, and trees are cut.
SMALL_BUDGET = {"max_num_batched_tokens": 96, "enable_chunked_prefill": True}
# What begins and ends a thought.
THINKING = {"reasoning_config": {"reasoning_start_str": "Question", "reasoning_end_str": "Answer"}}


def make_config(method: dict[str, Any] | None = None, *, model: str = TARGET, **flags: Any) -> Any:
    """The config of an engine with our method, not started."""
    from vllm.engine.arg_utils import EngineArgs

    settings = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 24}
    return EngineArgs(
        model, speculative_config={**TOKEN_RECYCLING, **(method or {})}, **(settings | flags)
    ).create_engine_config()


def mixed_params(count: int, *, max_tokens: int, **others: Any) -> list[Any]:
    """Sampling parameters of as many prompts: greedy and seeded in turn."""
    from vllm import SamplingParams

    given = {"max_tokens": max_tokens, "ignore_eos": True, **others}
    return [SamplingParams(temperature=0.7 * (i % 2), seed=i, **given) for i in range(count)]


def with_hint(params: Any, hint: str | list[int]) -> Any:
    """A copy of sampling parameters, with a hint."""
    params = params.clone()
    params.extra_args = {"hint": hint}
    return params


def read_prompts(count: int, *, max_words: int = 120) -> list[str]:
    """Prompts of three kinds in turn, of mixed lengths."""
    kinds = []
    for kind in PROMPT_KINDS:
        lines = (EXAMPLES / "prompts" / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        kinds.append([row.get("prompt") or row["turns"][0] for row in rows])
    mixed = [prompt for group in zip(*kinds, strict=False) for prompt in group]
    return [" ".join(prompt.split(" ")[:max_words]) for prompt in mixed[:count]]


@cache
def spare_later_engines() -> None:
    """Do once what vLLM does at each start and end of an engine, over all that was ever imported.

    It collects garbage seven times and looks for Triton kernels to replace: of four seconds these
    are three. On a GPU nothing is spared: vLLM's worker for CPUs puts placeholders in the place of
    CUDA's events when it is imported.
    """
    import torch

    if torch.cuda.is_available():
        return
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import cpu_worker  # noqa: F401

    gc.collect()
    gc.freeze()
    # What engines leave behind is collected as before.
    gc.freeze = gc.unfreeze = lambda: None
    # Remove the condition when vLLM 0.30 is dropped.
    if register := getattr(CpuPlatform, "register_triton_kernel_overrides", None):
        CpuPlatform.register_triton_kernel_overrides = staticmethod(cache(register))


@contextmanager
def engine(
    speculative_config: dict[str, Any] | None = None, *, model: str = TARGET, **overrides: Any
) -> Iterator[Any]:
    """An `LLM`, on the embedded target unless told; small, eager and shut down at the end."""
    from vllm import LLM

    spare_later_engines()
    settings = {
        "dtype": "float32",
        "kv_cache_memory_bytes": 64 << 20,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }
    llm = LLM(model, **(settings | overrides), speculative_config=speculative_config)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def use_two_ranks(monkeypatch: Any) -> None:
    """Let the next engine have its workers in processes, each bound to a core."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)


def generate(llm: Any, prompts: list[Any], params: Any) -> list[list[tuple[int, ...]]]:
    """Token ids of every output of every prompt."""
    results = llm.generate(prompts, params, use_tqdm=False)
    return [[tuple(output.token_ids) for output in result.outputs] for result in results]


def counter(llm: Any, name: str) -> int:
    """A counter of vLLM's metrics, summed over its labels; it counts from the engine's start."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def watch_steps(llm: Any) -> list[Any]:
    """The outputs of the scheduler, of all steps from now on."""
    scheduler, steps = core(llm).scheduler, []
    schedule = scheduler.schedule

    def watched(*args: Any) -> Any:
        steps.append(schedule(*args))
        return steps[-1]

    scheduler.schedule = watched
    return steps


def core(llm: Any) -> Any:
    """vLLM's EngineCore."""
    return llm.llm_engine.engine_core.engine_core


def runner(llm: Any) -> Any:
    """Our model runner."""
    return core(llm).model_executor.driver_worker.worker.model_runner


Chains = dict[tuple[int, ...], list[int]]


@contextmanager
def watched_chains(monkeypatch: Any) -> Iterator[Chains]:
    """What vLLM's proposer drafts behind each text, on the V1 runner."""
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    chains: Chains = {}
    propose = GPUModelRunner.propose_draft_token_ids

    def watched(self: Any, output: Any, sampled: Any, *args: Any) -> Any:
        drafts = propose(self, output, sampled, *args)
        batch, rows = self.input_batch, drafts.tolist() if torch.is_tensor(drafts) else drafts
        for index, chain in enumerate(rows):
            text = batch.token_ids_cpu[index, : batch.num_tokens_no_spec[index]].tolist()
            if torch.is_tensor(sampled):  # before vLLM has taken them in
                text += [token for token in sampled[index].tolist() if token >= 0]
            if chain and len(text) > batch.num_prompt_tokens[index]:
                chains[tuple(text)] = [*map(int, chain)]
        return drafts

    with monkeypatch.context() as patch:
        patch.setattr(GPUModelRunner, "propose_draft_token_ids", watched)
        yield chains
