"""Greedy float32 output is vLLM's own, token for token, whatever cuts and moves the trees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import (
    GROWN,
    HOSTED,
    OUROBOROS,
    PAPER,
    SMALL_BUDGET,
    SMALL_OUROBOROS,
    TARGET,
    TOKEN_RECYCLING,
    TRUNK,
    counter,
    engine,
    generate,
    read_prompts,
    runner,
)
from vllm import SamplingParams

from vllm_recycle.core.choose import Price
from vllm_recycle.core.curve import TREES
from vllm_recycle.core.draft import Drafts
from vllm_recycle.integration.options.ouroboros import FORWARDS_ON_GPU, SIZES

PROMPTS = read_prompts(40)
# For what differs in little from the defaults; twice as many as are served at a time.
FEW, MAX_NUM_SEQS = 16, 8
GREEDY = SamplingParams(temperature=0, max_tokens=48)


@pytest.fixture(scope="module")
def expected() -> list[list[tuple[int, ...]]]:
    with engine() as llm:
        return generate(llm, PROMPTS, GREEDY)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(TOKEN_RECYCLING, id="default"),
        pytest.param(PAPER, id="paper-80"),
        pytest.param(OUROBOROS, id="ouroboros"),
        pytest.param({**TRUNK, "row_cost": None}, id="trunk"),
        pytest.param({**HOSTED, "row_cost": None}, id="vLLM's trunk"),
    ],
)
def test_output_equals_vllm(expected, method):
    with engine(method) as llm:
        assert generate(llm, PROMPTS, GREEDY) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param({**PAPER, "scope": "shared"}, {}, id="scope shared", marks=pytest.mark.slow),
        pytest.param({**PAPER, "scope": "isolated"}, {}, id="scope isolated"),
        pytest.param(
            {**PAPER, "seed_from_prompt": False},
            {},
            id="no seed from prompt",
            marks=pytest.mark.slow,
        ),
        pytest.param(GROWN, {}, id="grown, no price"),
        pytest.param({**GROWN, "contexts": [1], "k": 3}, {}, id="grown, one token of context"),
        pytest.param({**TOKEN_RECYCLING, "row_cost": 0.1}, {}, id="grown, a price by hand"),
        pytest.param({**GROWN, "scope": "isolated"}, {}, id="grown, scope isolated"),
        pytest.param({**GROWN, "context_mib": 1}, {}, id="grown, a small table"),
        pytest.param(GROWN, SMALL_BUDGET, id="chunked prefill, small budget, cut trees"),
        pytest.param(GROWN, {"block_size": 32}, id="blocks of 32", marks=pytest.mark.slow),
        pytest.param(
            {**OUROBOROS, **SIZES, "max_forwards": FORWARDS_ON_GPU, "row_cost": 0},
            {"max_num_seqs": 4},
            id="ouroboros, the paper's sizes",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {**SMALL_OUROBOROS, "scope": "request"},
            {},
            id="ouroboros, own pools",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {**SMALL_OUROBOROS, "max_forwards": 2},
            {},
            id="ouroboros, two forwards",
            marks=pytest.mark.slow,
        ),
        pytest.param(SMALL_OUROBOROS, SMALL_BUDGET, id="ouroboros, small budget"),
        pytest.param({**TRUNK, "gamma": 7}, SMALL_BUDGET, id="trunk, small budget"),
        pytest.param(HOSTED, SMALL_BUDGET, id="vLLM's trunk, small budget"),
        pytest.param({**HOSTED, "scope": "isolated"}, {}, id="vLLM's trunk, isolated"),
        pytest.param(
            {**TRUNK, "scope": "isolated"}, {}, id="trunk, isolated", marks=pytest.mark.slow
        ),
    ],
)
def test_output_equals_vllm_with_other_settings(expected, method, settings):
    with engine(method, **{"max_num_seqs": MAX_NUM_SEQS, **settings}) as llm:
        assert generate(llm, PROMPTS[:FEW], GREEDY) == expected[:FEW]
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


all_methods = pytest.mark.parametrize(
    "method",
    [
        pytest.param(GROWN, id="grown"),
        pytest.param(SMALL_OUROBOROS, id="ouroboros"),
        pytest.param(TRUNK, id="trunk"),
        pytest.param(HOSTED, id="vLLM's trunk"),
    ],
)


@all_methods
def test_output_equals_vllm_on_prefix_cache_hits(expected, method):
    settings = {"enable_prefix_caching": True, "block_size": 32, "max_num_seqs": MAX_NUM_SEQS}
    with engine(method, **settings) as llm:
        first = generate(llm, PROMPTS[:FEW], GREEDY)
        hits = counter(llm, "prefix_cache_hits")
        second = generate(llm, PROMPTS[:FEW], GREEDY)
        assert counter(llm, "prefix_cache_hits") > hits
    assert first == expected[:FEW]
    assert second == expected[:FEW]


@all_methods
def test_output_equals_vllm_under_preemption(expected, method):
    # Room for two or three of the eight requests at their full length.
    with engine(
        method,
        block_size=32,
        num_gpu_blocks_override=21,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=640,
    ) as llm:
        assert generate(llm, PROMPTS[:FEW], GREEDY) == expected[:FEW]
        assert counter(llm, "num_preemptions") > 0
        generate(llm, PROMPTS[:1], GREEDY)  # what ended is released with the next step
        assert len(runner(llm).req_state_indices) == 1


@all_methods
def test_output_equals_vllm_up_to_max_model_len(method):
    tokens = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    settings = {"max_model_len": 160}
    with engine(None, **settings) as llm:
        prompts = [p for p in PROMPTS if len(llm.get_tokenizer().encode(p)) < 150][:8]
        expected = generate(llm, prompts, tokens)
    with engine(method, **settings) as llm:
        assert generate(llm, prompts, tokens) == expected


def test_output_equals_vllm_whatever_is_drafted():
    """Random topologies and sizes in each step, preemption, prefix hits, and the end of context."""
    random = torch.Generator().manual_seed(0)
    tokens = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    settings = {"max_model_len": 192, "max_num_seqs": MAX_NUM_SEQS, "block_size": 32}
    with engine(None, **settings) as llm:
        prompts = [p for p in PROMPTS if len(llm.get_tokenizer().encode(p)) < 150][:FEW]
        expected = generate(llm, prompts, tokens)
    crowded = {"enable_prefix_caching": True, "num_gpu_blocks_override": 24}
    with engine(GROWN, **settings, **crowded) as llm:
        proposer, sizes = runner(llm).tree_drafter.proposer, set()
        operations = proposer.operations

        def draft(matrix: Any, counts: torch.Tensor, texts: Any, **options: Any) -> Drafts:
            # Any rates, and any time of a step: so any tree, and any number of nodes.
            right = torch.rand(counts.shape[:-1], dtype=counts.dtype, generator=random)
            counts = torch.stack((1000 * right, torch.full_like(right, 1000)), dim=-1)
            (price, *_) = options["prices"].values()
            rising = torch.rand(len(price.seconds), generator=random).double().cumsum(0)
            options["prices"] = {TREES: Price(1 + rising / 20)}
            drafts = operations.draft(matrix, counts, texts, **options)
            sizes.update(map(len, drafts[0]))
            return drafts

        proposer.operations = SimpleNamespace(**{**vars(operations), "draft": draft})
        assert generate(llm, prompts, tokens) == expected
        for _ in range(2):  # so few leave room for what others may hit
            assert generate(llm, prompts[:2], tokens) == expected[:2]
        assert counter(llm, "num_preemptions") > 0
        assert counter(llm, "prefix_cache_hits") > 0
        assert {0, 80} <= sizes
        assert len(sizes) > 20


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(TOKEN_RECYCLING, id="default"),
        # The target drafts for itself: the heads of the small draft model are three.
        pytest.param({**SMALL_OUROBOROS, "model": TARGET}, id="ouroboros"),
    ],
)
def test_output_equals_vllm_with_two_tensor_parallel_ranks(expected, method, tmp_path):
    script = tmp_path / "two_ranks.py"
    script.write_text(
        "import json, sys\n"
        "from vllm import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    model, method, prompts = json.load(sys.stdin)\n"
        "    llm = LLM(model, dtype='float32', tensor_parallel_size=2, enforce_eager=True,\n"
        "              max_num_seqs=16, kv_cache_memory_bytes=64 << 20, seed=0,\n"
        "              disable_log_stats=False, speculative_config=method)\n"
        "    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48))\n"
        "    accepted = sum(m.value for m in llm.get_metrics()\n"
        "                   if m.name == 'vllm:spec_decode_num_accepted_tokens')\n"
        "    ids = [o.outputs[0].token_ids for o in outputs]\n"
        "    json.dump([accepted, ids], open(sys.argv[1], 'w'))\n"
    )
    output = tmp_path / "output.json"
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    }
    environment.pop("VLLM_CPU_NUM_OF_RESERVED_CPU", None)
    # A group of processes: the workers of an engine that hangs would outlive it, and spin.
    process = subprocess.Popen(
        [sys.executable, str(script), str(output)],
        stdin=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,
    )
    try:
        process.communicate(json.dumps([TARGET, method, PROMPTS[:12]]), timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0
    accepted, outputs = json.loads(output.read_text())
    assert accepted > 0
    got = [[tuple(token_ids)] for token_ids in outputs]
    assert got == expected[:12]
