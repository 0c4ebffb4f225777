"""On a GPU: a step of ours never waits for it, graphs and all, and greedy output is vLLM's own."""

from __future__ import annotations

import pytest
import torch
from engines import PAPER, TOKEN_RECYCLING, core, counter, engine, read_prompts
from vllm import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = read_prompts(16)
# 16 bits, since FlashAttention has no others.
SETTINGS = {"dtype": "bfloat16", "enforce_eager": False, "kv_cache_memory_bytes": 1 << 30}
# Where bfloat16 may fall either way: twice the distance of neighbouring numbers around 16.
NEAR_TIE = 0.25


def generate(llm) -> list[tuple[list[int], list[float]]]:
    """Tokens, and how far the two most probable ones were apart."""
    params = SamplingParams(temperature=0, max_tokens=48, logprobs=2)
    found = []
    for result in llm.generate(PROMPTS, params, use_tqdm=False):
        output = result.outputs[0]
        best = [sorted(-entry.logprob for entry in step.values()) for step in output.logprobs]
        found.append((list(output.token_ids), [second - first for first, second, *_ in best]))
    return found


@pytest.fixture(scope="module")
def expected():
    with engine(**SETTINGS) as llm:
        return generate(llm)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param(TOKEN_RECYCLING, {}, id="grown, graphs"),
        pytest.param(TOKEN_RECYCLING, {"enforce_eager": True}, id="grown, eager"),
        pytest.param(PAPER, {}, id="paper-80, graphs"),
    ],
)
def test_output_differs_at_near_ties_alone(expected, method, settings):
    with engine(method, **SETTINGS | settings) as llm:
        got = generate(llm)
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
    for (tokens, gaps), (others, _) in zip(expected, got, strict=True):
        pairs = enumerate(zip(tokens, others, strict=True))
        first = next((i for i, (a, b) in pairs if a != b), None)
        assert first is None or gaps[first] < NEAR_TIE


@pytest.mark.parametrize("method", [TOKEN_RECYCLING, PAPER], ids=["grown", "paper-80"])
def test_no_step_waits_for_the_device(method):
    with engine(method, **SETTINGS) as llm:
        runner = core(llm).model_executor.driver_worker.worker.model_runner
        for owner, name in (
            (runner, "prepare_attn"),
            (runner, "sample"),
            (runner.speculator, "propose"),
        ):
            setattr(owner, name, forbidding_synchronisation(getattr(owner, name)))
        generate(llm)
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


def forbidding_synchronisation(function):
    def guarded(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return guarded
