"""On a GPU: what a first hour must know of each kind of engine, in a quarter of an hour.

Engines run as a server's do: compiled, with graphs, prefix caching and asynchronous scheduling, and
end where a kernel is compiled while they serve. Each serves once; `gpu_checks` has what judges it.
What is printed with `-rP` are the largest errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.cuda.gpu_checks import (
    Answer,
    Row,
    Verdict,
    judge,
    judge_rows,
    serve,
    watch_rows,
)
from tests.integration.cuda.v2_engines import with_sizes
from tests.integration.engines import (
    OUROBOROS,
    TARGET,
    TOKEN_RECYCLING,
    core,
    counter,
    engine,
    read_prompts,
    runner,
)
from tests.integration.models.adapters import write_adapter
from tests.integration.models.random_models import granite_hybrid, qwen3_next

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# 16 bits, since FlashAttention has no others.
SETTINGS = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 1 << 30,
    "jit_monitor_mode": "error",
}
# Where bfloat16 may fall either way: twice the distance of neighbouring numbers around 16.
NEAR_TIE = 0.25
# Of seeded tokens, the part that near ties may let fall the other way.
TIES = 0.03
LENGTH = 48
GREEDY = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, "logprobs": 0}
SEEDED = {"temperature": 0.8, "max_tokens": LENGTH, "ignore_eos": True}
SAMPLED = [
    {**SEEDED, "seed": 1},
    {**SEEDED, "seed": 2, "top_k": 20, "top_p": 0.9},
    {**SEEDED, "seed": 3, "min_p": 0.05, "repetition_penalty": 1.2},
]
REGEX = r" The (answer|result) is \d{1,3}\."
FOLLOWING = {"temperature": 0.0, "max_tokens": 24}
TWO_DEVICES = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
# Sizes are chosen by the time that they take in the first engine alone: in a small model trees may
# not pay.
SIZES = [(1, 2, 48), (3, 16, 16)]
GROWN = with_sizes(TOKEN_RECYCLING, SIZES)
PAPER = with_sizes({**TOKEN_RECYCLING, "tree": "paper-80"}, SIZES)
# What differs from the settings, by name: of the method, and of the engine.
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grown": (TOKEN_RECYCLING, {}),
    "template": (PAPER, {}),
    "eager": (GROWN, {"enforce_eager": True}),
    # Room for the prompts and little more.
    "crowded": (GROWN, {"num_gpu_blocks_override": 100, "max_model_len": 512}),
    "ouroboros": (OUROBOROS, {}),
    "adapters": (GROWN, {"enable_lora": True, "max_loras": 1}),
    "two devices": (GROWN, {"tensor_parallel_size": 2}),
}


@dataclass
class Served:
    """What an engine gave, and what was seen."""

    answers: list[Answer] = field(default_factory=list)
    grammars: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    verdict: Verdict | None = None
    rows_are_off_by: float = 0.0


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = [tokenizer.encode(prompt) for prompt in read_prompts(16)]
    return [(p, GREEDY if i % 2 else SAMPLED[i // 2 % 3]) for i, p in enumerate(prompts)]


def run(name: str, adapter: Any) -> Served:
    """An engine, and each kind of traffic."""
    method, settings = ENGINES[name]
    found, asked = Served(), requests()
    adapters = (None, adapter) if name == "adapters" else (None,)
    with engine(method, **SETTINGS | settings) as llm:
        if name != "two devices":  # whose workers are other processes
            watch_rows(llm, found.rows, most=24)
        found.answers += serve(llm, asked, adapters=adapters)
        # Prompts that the prefix cache has, one after another, beside others that decode.
        found.answers += serve(llm, asked[::-1], steps_between=3, adapters=adapters)
        grammar = StructuredOutputsParams(regex=REGEX)
        follow = {**FOLLOWING, "structured_outputs": grammar}
        found.grammars = [serve(llm, [(prompt, follow)])[0].text for prompt, _ in asked[:3]]
        if name in ("grown", "template"):
            switch_sizes(llm)
            found.answers += serve(llm, asked)
        for what in ("spec_decode_num_accepted_tokens", "num_preemptions", "prefix_cache_hits"):
            found.counts[what] = counter(llm, what)
    return found


def switch_sizes(llm: Any) -> None:
    """Let trees be of another size in each step, none among them."""
    sizes = {nodes for sizes in runner(llm).sizes_of_batch for nodes in sizes}
    turns = cycle(sorted({0, *sizes, *(2 * nodes // 3 for nodes in sizes)}))

    class Turns:
        def __getitem__(self, num_reqs: int) -> int:
            return next(turns)

    core(llm).scheduler.dynamic_sd_lookup = Turns()


@pytest.fixture(scope="module")
def served(request, tmp_path_factory) -> dict[str, Served | Exception]:
    """The engines that are asked for (`-k grown`), one after another, and then the judge."""
    folder = tmp_path_factory.mktemp("adapter") / "one"
    adapter = LoRARequest("one", 1, write_adapter(folder, TARGET, seed=2, has_head=False))
    found: dict[str, Served | Exception] = {}
    tests = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    for name in dict.fromkeys(test["one"] for test in tests if "one" in test):
        if name == "two devices" and torch.cuda.device_count() < 2:
            continue
        try:
            found[name] = run(name, adapter)
        except Exception as error:  # of this engine's tests alone
            found[name] = error
    with engine(**SETTINGS | {"enable_lora": True, "max_loras": 1}) as llm:
        for one in found.values():
            if isinstance(one, Served):
                one.verdict = judge(llm, one.answers)
                one.rows_are_off_by = judge_rows(llm, one.rows) if one.rows else 0.0
    return found


@pytest.fixture(params=[*list(ENGINES)[:-1], pytest.param("two devices", marks=TWO_DEVICES)])
def one(request, served) -> tuple[str, Served]:
    found = served[request.param]
    if isinstance(found, Exception):
        raise found
    print(f"{request.param}: {found.verdict}, rows off by {found.rows_are_off_by}, {found.counts}")
    return request.param, found


def test_tokens_and_logprobs_are_those_without_speculation(one):
    _, found = one
    assert found.verdict.gap <= NEAR_TIE
    assert found.verdict.drawn_again >= 1.0 - TIES
    assert found.verdict.logprob_error <= NEAR_TIE


def test_rows_of_trees_are_those_of_a_plain_prefill(one):
    name, found = one
    assert found.rows_are_off_by <= NEAR_TIE
    assert name == "two devices" or max(row.depth for row in found.rows) > 1


def test_traffic_was_of_every_kind(one):
    name, found = one
    assert all(re.fullmatch(REGEX, text) for text in found.grammars)
    assert found.counts["spec_decode_num_accepted_tokens"] > 0
    assert found.counts["prefix_cache_hits"] > 0
    assert (found.counts["num_preemptions"] > 0) == (name == "crowded")


# No step waits for the device.


@pytest.mark.parametrize("method", [GROWN, PAPER, OUROBOROS], ids=["grown", "paper", "ouroboros"])
def test_no_step_waits_for_the_device(method):
    with engine(method, **SETTINGS) as llm:
        for owner, names in (
            (runner(llm), ("add_requests", "prepare_attn", "sample")),
            (runner(llm).speculator, ("propose",)),
        ):
            for name in names:
                setattr(owner, name, forbidding_synchronisation(getattr(owner, name)))
        serve(llm, requests(), steps_between=1)
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


def forbidding_synchronisation(function: Callable) -> Callable:
    def guarded(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return guarded


# Recurrent layers, whose kernels are vLLM's.


@pytest.mark.parametrize("make", [granite_hybrid, qwen3_next])
def test_tokens_of_recurrent_layers_are_those_without_speculation(make, tmp_path):
    settings = SETTINGS | {
        "model": make(tmp_path / "model"),
        "enable_prefix_caching": False,
        "jit_monitor_mode": "warn",
    }
    asked = [(prompt, GREEDY) for prompt, _ in requests()]
    with engine(TOKEN_RECYCLING, **settings) as llm:
        answers = serve(llm, asked) + serve(llm, asked[::-1], steps_between=3)
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
    with engine(**settings) as llm:
        verdict, plain = judge(llm, answers), judge(llm, serve(llm, asked))
    print(f"{verdict}; without speculation {plain}")
    assert max(plain.gap, plain.logprob_error) <= NEAR_TIE  # else the judge cannot tell
    assert max(verdict.gap, verdict.logprob_error) <= NEAR_TIE


# A vocabulary and contexts as they are served.

LONG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "dtype": "bfloat16",
}
CONTEXTS = (500, 8_000, 32_000)


def randomize(model: torch.nn.Module) -> None:
    """Weights of a usual size: with vLLM's, attention would hardly matter."""
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(std=weight.shape[-1] ** -0.5)
        else:
            weight.data.fill_(1)


def test_rows_behind_long_contexts_in_a_large_vocabulary(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LONG))
    settings = SETTINGS | {
        "model": str(tmp_path),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": 33_000,
        "kv_cache_memory_bytes": 4 << 30,
    }
    torch.manual_seed(1)
    # A half that comes twice, so that there is something to draft.
    halves = [torch.randint(LONG["vocab_size"], (1, context // 2)) for context in CONTEXTS]
    prompts = [half.repeat(1, 2)[0].tolist() for half in halves]
    params = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "detokenize": False}
    rows: list[Row] = []
    with engine(GROWN, **settings) as llm:
        llm.apply_model(randomize)
        for at, prompt in enumerate(prompts, start=1):
            watch_rows(llm, rows, most=8 * at, first_step=1)
            serve(llm, [(prompt, params)])
    with engine(**settings) as llm:
        llm.apply_model(randomize)
        off = judge_rows(llm, rows)
    print(f"rows off by {off}")
    lengths = [len(row.token_ids) for row in rows]
    assert [sum(length >= most for length in lengths) for most in CONTEXTS] == [24, 16, 8]
    assert off <= NEAR_TIE
