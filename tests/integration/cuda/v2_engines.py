"""Engines of Model Runner V2 in these tests: what they are, what they are asked and watched for.

A few tests are of both runners, and ask the same of engines with V1.

V2 runs under the Triton interpreter, which has to be set up before vllm is imported: the engines
are in a process of their own, see `v2_scripts`. The shim makes what runs what a GPU runs: the
runner, worker and scheduler of CUDA, asynchronous scheduling, all of our Triton kernels, a KV cache
of the GPU's layout. What still differs from a GPU:

    FlashAttention's functions, for the rows that are no tree, are torch's
    trees are attended to in larger tiles than float32 has, and no context is split
    nothing is captured into CUDA graphs (but in `test_sizes`)
    vLLM's kernels for top-k and top-p do not run in the interpreter: no request asks for them
    float32, so that outputs compare; the interpreter knows nothing of tensor cores
    one process, one rank (but `test_ranks`)
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.engines import core, counter, runner
from vllm_recycle.core.curve import TREES, TRUNKS
from vllm_recycle.core.graph_curve import GraphShape, GraphTimes
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.integration.cuda import runner as v2_runner
from vllm_recycle.kernels.triton.kv_cache import compact_path

IS_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
MODEL = str(Path(__file__).parents[3] / "examples" / "models" / "draft")
TEXT = """Question: A train travels 60 miles an hour. How many miles does it travel in 3 hours?
Answer: It travels 60 * 3 = 180 miles. #### 180

Question: A car travels 40 miles an hour. How many miles does it travel in 2 hours?
Answer: It travels 40 * 2 = 80 miles. #### 80

Question: A bus travels 30 miles an hour. How many miles does it travel in 5 hours?
Answer: It travels"""
BLOCK_SIZE = 32
LLM_ARGUMENTS = {
    "model": MODEL,
    "max_model_len": 112,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": 11,  # one of them is never used
    "kv_cache_memory_bytes": 8 << 20,
    "enable_prefix_caching": True,
    "async_scheduling": IS_V2,
}
# Siblings first, so that no accepted path of two nodes lies where a chain's would.
TREE = TreeTemplate(((0, 0), (0, 1), (1, 0), (0, 2), (2, 0), (3, 0), (1, 1), (4, 0)), "siblings")
# Three requests or four get a prefix of it.
SCHEDULE = [(1, 2, 8), (3, 4, 5)]
GROWN = {"method": "token_recycling", "max_nodes": TREE.num_nodes, "context_mib": 1}
GREEDY = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "seed": 7, "max_tokens": 10, "ignore_eos": True, "logprobs": 1}
# What waits for the device, as CUDA's synchronisation debug mode would say.
SYNCHRONISING = (
    "item",
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
)


def with_sizes(method: dict[str, Any], sizes: list[tuple[int, int, int]]) -> dict[str, Any]:
    """The method, with the user's table of draft sizes."""
    return {**method, "num_speculative_tokens_per_batch_size": sizes}


def generate(llm: Any, batches: Any) -> list[dict[str, Any]]:
    """Token ids and their logprobs of every request.

    Args:
        llm: the engine.
        batches: of requests: which tokens of TEXT are the prompt, and the sampling parameters.

    """
    token_ids = llm.get_tokenizer().encode(TEXT)
    outputs = []
    for batch in batches:
        prompts = [{"prompt_token_ids": token_ids[slice(*at)]} for at, _ in batch]
        params = []
        for _, given in batch:
            grammar = given.get("structured_outputs")
            more = {"structured_outputs": StructuredOutputsParams(**grammar)} if grammar else {}
            params.append(SamplingParams(**{**given, **more}))
        for request, given in zip(
            llm.generate(prompts, params, use_tqdm=False), params, strict=True
        ):
            output = request.outputs[0]
            found = {}
            if given.logprobs is not None:
                found["sampled"] = pick(output.token_ids, output.logprobs)
            if given.logprob_token_ids:
                chosen = [[step[token].logprob for token in (14, 15)] for step in output.logprobs]
                found["chosen tokens"] = [value for values in chosen for value in values]
            if given.prompt_logprobs is not None:
                found["prompt"] = pick(request.prompt_token_ids[1:], request.prompt_logprobs[1:])
            outputs.append({"token_ids": list(output.token_ids), "logprobs": found})
    return outputs


def pick(token_ids: Any, logprobs: Any) -> list[float]:
    return [step[token_id].logprob for token_id, step in zip(token_ids, logprobs, strict=True)]


def tokens_of(llm: Any, *batches: Any) -> list[list[int]]:
    """The token ids alone."""
    return [output["token_ids"] for output in generate(llm, batches)]


class Waits(TorchDispatchMode):
    """Records the operations that would wait for a device, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        indices = args[1] if name.startswith(("aten.index.", "aten.index_put")) else ()
        masks = [index for index in indices or () if getattr(index, "dtype", None) == torch.bool]
        if masks or name.split(".")[1] in SYNCHRONISING:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))

    def watch(self, owner: Any, *names: str) -> None:
        """Record those of functions of a module or an object, from now on."""
        for name in names:
            setattr(owner, name, watched(getattr(owner, name), self))


def unwatched(owner: Any, name: str) -> None:
    """Record nothing of a function of an object from now on: vLLM's that looks at host tensors."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    setattr(owner, name, call)


def watched(function: Any, waits: Waits) -> Any:
    """The function, with its waits recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with waits:
            return function(*args, **kwargs)

    return call


def watch_moves(waits: Waits | None = None) -> Counter[str]:
    """Count the rows that are moved from now on, by the layers in whose cache they are."""
    moved: Counter[str] = Counter()

    def compact(layers: Any, slots: Any, rows: Any, starts: Any, path: Any) -> None:
        moved[str(id(layers))] += int((path > torch.arange(path.shape[1])).sum())
        with waits or nullcontext():
            compact_path(layers, slots, rows, starts, path)

    v2_runner.compact_path = compact
    return moved


def serve_priced(llm: Any, prices: dict[str, tuple[list, Any, float]]) -> dict[str, Any]:
    """What an engine that drafts along trunks gives where it is told what that takes.

    Args:
        llm: the engine. Its steps have no graphs here, and are taken to last a minute.
        prices: by name a batch of requests, what a round is taken to last, in seconds, None for
            what was measured, and what drafts last without one.

    """
    found: dict[str, Any] = {"token ids": {}, "rounds": {}, "accepted tokens": {}}
    sizes, drafter = core(llm).scheduler.sizes, runner(llm).tree_drafter
    timed = runner(llm).speculator.times.drafting
    found |= {"rounds timed for": timed[TRUNKS], "alone timed for": timed[TREES]}
    for name, (batch, round_seconds, alone_seconds) in prices.items():
        drafting = timed[TRUNKS] if round_seconds is None else {1: round_seconds}
        graphs = {GraphShape(64, 64, 64): (60.0, 0.0)}
        sizes.take_times(GraphTimes(graphs, {TRUNKS: drafting, TREES: {1: alone_seconds}}))
        rounds, accepted = drafter.num_rounds, counter(llm, "spec_decode_num_accepted_tokens")
        found["token ids"][name] = tokens_of(llm, batch)
        found["rounds"][name] = drafter.num_rounds - rounds
        accepted = counter(llm, "spec_decode_num_accepted_tokens") - accepted
        found["accepted tokens"][name] = accepted
    return found
