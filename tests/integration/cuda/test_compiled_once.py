"""What is served on Model Runner V2 launches no kernel of ours that warm-up has not compiled.

Compiling takes half a second and more, and all requests wait. Bursts of prompts arrive beside trees
of many sizes. Of a launch is recorded by what Triton would compile it anew: constants, which
arguments there are and of what type, and which numbers are 1 or divisible by 16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import core, engine, runner
from v2_engines import GREEDY, GROWN, LLM_ARGUMENTS, TEXT
from vllm import SamplingParams
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.warmup import warmup_kernels

from vllm_recycle.kernels.triton.attention import tiles, tree_attention

pytestmark = pytest.mark.slow

NODES = 24
# Nodes of trees, and requests that arrive beside one of them: tiles of all heights.
ROUNDS = [(NODES, 1), (12, 2), (6, 5), (3, 9)]
ARGUMENTS = LLM_ARGUMENTS | {
    "max_num_seqs": 12,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 64,
}
STEPS = 3  # that trees of a size have before and behind a burst


def test_nothing_is_compiled_while_serving(result):
    assert result["compiled while serving"] == []


def test_there_were_tiles_of_all_heights_beside_prompts(result):
    assert result["queries of tiles"] == [16, 32, 64, 128]
    assert {"_mark_prompt_kernel", "_mark_step_kernel", "attend_kernel"} <= set(result["served"])
    assert max(result["prompts of a step beside trees"]) >= 9


class Compiled:
    """In the process with the engine: the variants of our kernels that were launched."""

    def __init__(self) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        self.seen: set[str] = set()
        run = InterpretedFunction.run

        def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if kernel.fn.__module__.startswith("vllm_recycle"):
                self.seen.add(variant(kernel, args, kwargs))
            return run(kernel, *args, **kwargs)

        InterpretedFunction.run = launched


def variant(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> str:
    """By what Triton tells the compiled forms of a kernel apart."""
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    del given["grid"], given["warmup"]
    free = kernel.kwargs.get("do_not_specialize") or ()
    hints = kernel.fn.__annotations__
    kinds = {}
    for name, value in given.items():
        is_constant = "constexpr" in str(hints.get(name, "constexpr"))
        if isinstance(value, torch.Tensor):
            kinds[name] = str(value.dtype)
        elif type(value) is int and not is_constant:
            kinds[name] = "int" if name in free else f"int, {value == 1}, {value % 16 == 0}"
        else:
            kinds[name] = type(value).__name__ if isinstance(value, float) else repr(value)
    return f"{kernel.__name__} {kinds}"


def serve(llm: Any, seen: dict[str, Any]) -> None:
    """In the process with the engine: bursts arrive while the first request has trees."""
    token_ids = llm.get_tokenizer().encode(TEXT)
    served, scheduler = llm.llm_engine, core(llm).scheduler
    prepare_attn = runner(llm).prepare_attn

    def watched(batch: Any) -> Any:
        if batch.has_prefill and batch.num_draft_tokens:
            seen["prompts of a step beside trees"].append(
                int((batch.num_draft_tokens_per_req == 0).sum())
            )
        return prepare_attn(batch)

    def add(name: str, first: int, max_tokens: int) -> None:
        params = SamplingParams(**GREEDY | {"max_tokens": max_tokens})
        prompt = {"prompt_token_ids": token_ids[first : first + 12]}
        served.add_request(name, prompt, params)

    runner(llm).prepare_attn = watched
    for nodes, burst in ROUNDS:
        scheduler.dynamic_sd_lookup = [nodes] * (1 + ARGUMENTS["max_num_seqs"])
        names = [f"{nodes} {index}" for index in range(1 + burst)]
        add(names[0], 0, 90)
        for _ in range(STEPS):
            served.step()
        for first, name in enumerate(names[1:]):
            add(name, first, 90)
        for _ in range(STEPS):
            served.step()
        served.abort_request(names)
        while served.has_unfinished_requests():
            served.step()


def main(_: Path) -> dict[str, Any]:
    """In the process with the engine: one whose attention has the tiles of a GPU."""
    heights: list[int] = []

    def choose_tile(*args: Any, **kwargs: Any) -> Any:
        tile = tiles.choose_tile(*args, **kwargs | {"itemsize": 2})
        heights.append(tile.queries)
        return tile

    tree_attention.choose_tile = choose_tile
    tree_attention.choose_num_splits = tiles.choose_num_splits
    compile_or_warm_up = CPUWorker.compile_or_warm_up_model

    def warm_up_as_on_a_gpu(worker: Any) -> Any:
        warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
        return compile_or_warm_up(worker)

    CPUWorker.compile_or_warm_up_model = warm_up_as_on_a_gpu
    SamplingParams.for_sampler_warmup = staticmethod(lambda: SamplingParams(**GREEDY))
    compiled = Compiled()
    result: dict[str, Any] = {"prompts of a step beside trees": []}
    with engine(GROWN | {"max_nodes": NODES}, **ARGUMENTS) as llm:
        warm, compiled.seen = compiled.seen, set()
        heights.clear()
        serve(llm, result)
    return result | {
        "compiled while serving": sorted(compiled.seen - warm),
        "served": sorted({one.split(" ")[0] for one in compiled.seen}),
        "queries of tiles": sorted(set(heights)),
    }
