"""What is served on Model Runner V2 launches no kernel of ours that warm-up has not compiled.

Compiling takes half a second and more, and all requests wait; vLLM's `--jit-monitor-mode error`
ends the engine. Bursts of prompts arrive beside trees of many sizes; of the requests some look back
on their output, one has a hint, and texts are taken in for all. All launches compile for a GPU.
"""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.warmup import warmup_kernels
from vllm.v1.worker.gpu_worker import Worker

from tests.integration.cuda.test_ouroboros import METHOD as OUROBOROS
from tests.integration.cuda.v2_engines import GREEDY, GROWN, LLM_ARGUMENTS, SEEDED, TEXT
from tests.integration.engines import TARGET, core, engine, runner
from tests.integration.models import heads
from tests.kernels.triton.compiler_process import printed_by
from tests.kernels.triton.recorded_launches import Recorder
from vllm_recycle.core.grow import LEVELS
from vllm_recycle.integration.cuda import sampling
from vllm_recycle.integration.requests.parameters import looks_back
from vllm_recycle.kernels.triton.attention import tiles, tree_attention

pytestmark = pytest.mark.slow

NODES = 24
# Nodes of trees, and requests that arrive beside one of them: tiles of all heights; in all engines
# but the first the second alone.
ROUNDS = [(NODES, 1), (12, 2), (6, 5), (3, 9)]
ARGUMENTS = LLM_ARGUMENTS | {
    "max_num_seqs": 12,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 64,
}
STEPS = 3  # that trees of a size have before and behind a burst
# Of the first request of a small burst; the others are greedy.
ALL = SEEDED | {
    "repetition_penalty": 1.2,
    "bad_words": ["How many"],
    "min_p": 0.02,
    "extra_args": {"prediction": {"type": "content", "content": TEXT[:80]}},
}
FEW = GROWN | {"max_nodes": 7}
# What the paper has, but for trees that grow.
UNSEEDED = {"preset": "paper", "tree": "dynamic", "contexts": [1, 2, 4, 16]}
# By name: the method, a kernel that it has, and what is smaller where rounds of few requests have
# all shapes.
ENGINES = {
    "grown": (GROWN | {"max_nodes": NODES}, "_grow_kernel", {}),
    "grown, without seeding": (FEW | UNSEEDED, "_seed_kernel", {}),
    "ouroboros": (OUROBOROS, "_walk_kernel", LLM_ARGUMENTS),
    # The head's own kernels are vLLM's; its trunk is chosen by ours.
    "eagle": (FEW, "_top_k_kernel", LLM_ARGUMENTS | {"model": TARGET}),
}


@pytest.mark.parametrize("name", ENGINES)
def test_nothing_is_compiled_while_serving(result, name):
    found = result[name]
    assert found["compiled while serving"] == []
    assert {"attend_kernel", ENGINES[name][1]} <= set(found["served"])
    assert max(found["prompts of a step beside trees"]) >= (9 if name == "grown" else 2)
    assert name != "grown" or found["queries of tiles"] == [16, 32, 64, 128]


def test_a_chain_has_no_rows_behind_its_levels(result):
    assert result["grown"]["longest drafts"] == {"of others": NODES, "that look back": LEVELS}


def test_all_that_is_launched_compiles(result):
    compiled = {one["kernel"] for one in printed_by("compile_kernels", result["launches"])}
    assert all(compiled >= {*result[name]["served"]} for name in ENGINES)


def serve(llm: Any, rounds: list[tuple[int, int]]) -> tuple[list[int], dict[str, int]]:
    """In the process with the engine: bursts arrive while the first request has trees.

    Returns how many prompts the steps had that had trees too, and the nodes of the longest drafts.
    """
    token_ids, prompts, longest = llm.get_tokenizer().encode(TEXT), [], Counter[str]()
    requests = core(llm).scheduler.requests
    served, prepare_attn = llm.llm_engine, runner(llm).prepare_attn

    def watched(batch: Any) -> Any:
        if batch.has_prefill and batch.num_draft_tokens:
            prompts.append(int((batch.num_draft_tokens_per_req == 0).sum()))
        lengths = batch.num_draft_tokens_per_req if batch.num_draft_tokens else ()
        for name, length in zip(batch.req_ids, lengths, strict=False):
            whose = "that look back" if looks_back(requests[name].sampling_params) else "of others"
            longest[whose] = max(longest[whose], int(length))
        return prepare_attn(batch)

    runner(llm).prepare_attn = watched
    most = runner(llm).tree_drafter.trees.num_nodes
    for nodes, burst in rounds:
        sizes = [min(nodes, most)] * (1 + ARGUMENTS["max_num_seqs"])
        core(llm).scheduler.dynamic_sd_lookup = sizes
        names = [f"{nodes} {index}" for index in range(1 + burst)]
        for step in range(2 * STEPS):
            for index in {0: [0], STEPS: range(1, 1 + burst)}.get(step, ()):
                prompt = {"prompt_token_ids": token_ids[max(0, index - 1) :][:12]}
                params = ALL if index == 1 and burst <= 2 else GREEDY
                params = SamplingParams(**params | {"max_tokens": 90})
                served.add_request(names[index], prompt, params)
            served.step()
        served.abort_request(names)
        while served.has_unfinished_requests():
            served.step()
    return prompts, longest


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: their attention has the tiles of a GPU."""
    heights: set[int] = set()

    def choose_tile(*args: Any, **kwargs: Any) -> Any:
        tile = tiles.choose_tile(*args, **kwargs | {"itemsize": 2})
        heights.add(tile.queries)
        return tile

    tree_attention.choose_tile = choose_tile
    tree_attention.choose_num_splits = tiles.choose_num_splits
    sampling.get_max_chunk_logits = lambda vocab_size: 40  # so that a step has several
    compile_or_warm_up = CPUWorker.compile_or_warm_up_model
    compiled, launches, warm = Recorder(), {}, []

    def warm_up_as_on_a_gpu(worker: Any) -> Any:
        warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
        times = compile_or_warm_up(worker)
        worker._maybe_activate_jit_monitor()
        return times

    CPUWorker.compile_or_warm_up_model = warm_up_as_on_a_gpu
    Worker._maybe_activate_jit_monitor = lambda worker: warm.append(compiled.take())
    # vLLM's, without what its kernels do not do in the interpreter.
    params = SamplingParams.for_sampler_warmup()
    params.top_k, params.top_p, params.watermarking = 0, 1.0, None
    SamplingParams.for_sampler_warmup = staticmethod(params.clone)
    result = {}
    for name, (method, _, few) in ENGINES.items():
        if name == "eagle":
            trunk = {"method": "eagle", "model": heads.eagle(folder / name)}
            method = method | {"trunk": trunk}
        with engine(method, **ARGUMENTS | few) as llm:
            heights.clear()
            prompts, longest = serve(llm, ROUNDS if name == "grown" else ROUNDS[1:2])
            if not few:
                llm.collective_rpc("learn_texts", args=([TEXT],))
        served, warmed = compiled.take(), warm.pop()
        result[name] = {
            "compiled while serving": sorted(served.keys() - warmed),
            "served": sorted({one.split(" ")[0] for one in served}),
            "queries of tiles": sorted(heights),
            "prompts of a step beside trees": prompts,
            "longest drafts": longest,
        }
        launches |= warmed | served
    result["launches"] = str(folder / "launches")
    Path(result["launches"]).write_bytes(pickle.dumps(list(launches.values())))
    return result
