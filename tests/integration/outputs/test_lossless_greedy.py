"""Greedy float32 output is vLLM's own, token for token, whatever cuts and moves the trees."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.integration.engines import (
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
    use_two_ranks,
)
from tests.integration.models import heads
from vllm_recycle.core.choose import Price
from vllm_recycle.core.curve import TREES
from vllm_recycle.core.draft import Drafts
from vllm_recycle.integration.options.ouroboros import FORWARDS_ON_GPU, SIZES

PROMPTS = read_prompts(40)
# For what differs in little from the defaults; twice as many as are served at a time.
FEW, MAX_NUM_SEQS = 16, 8
GREEDY = SamplingParams(temperature=0, max_tokens=48)
# Up to the end of a short context.
ENDLESS = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
SHORT = {"max_model_len": 192, "max_num_seqs": MAX_NUM_SEQS, "block_size": 32}


@pytest.fixture(scope="module")
def expected() -> list[list[tuple[int, ...]]]:
    with engine() as llm:
        return generate(llm, PROMPTS, GREEDY)


@pytest.mark.versions
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
        pytest.param({**GROWN, "contexts": [1], "k": 3}, {}, id="grown, one token of context"),
        pytest.param({**TOKEN_RECYCLING, "row_cost": 0.1}, {}, id="grown, a price by hand"),
        pytest.param({**GROWN, "context_mib": 1}, {}, id="grown, a small table"),
        pytest.param(GROWN, SMALL_BUDGET, id="chunked prefill, small budget, cut trees"),
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
        pytest.param(GROWN, id="grown", marks=pytest.mark.versions),
        pytest.param(SMALL_OUROBOROS, id="ouroboros"),
        pytest.param(TRUNK, id="trunk"),
        pytest.param(HOSTED, id="vLLM's trunk"),
    ],
)


@all_methods
def test_output_equals_vllm_under_preemption_and_on_prefix_hits(expected, method):
    # Room for two or three of the eight requests at their full length.
    with engine(
        method,
        block_size=32,
        num_gpu_blocks_override=21,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=640,
        enable_prefix_caching=True,
    ) as llm:
        assert generate(llm, PROMPTS[:FEW], GREEDY) == expected[:FEW]
        assert counter(llm, "num_preemptions") > 0
        hits = counter(llm, "prefix_cache_hits")
        for _ in range(2):  # so few leave room for what others may hit
            assert generate(llm, PROMPTS[:2], GREEDY) == expected[:2]
        assert counter(llm, "prefix_cache_hits") > hits
        generate(llm, PROMPTS[:1], GREEDY)  # what ended is released with the next step
        assert len(runner(llm).req_state_indices) == 1


@pytest.fixture(scope="module")
def up_to_the_end() -> tuple[list[str], list[list[tuple[int, ...]]]]:
    """Prompts, and what follows them in a short context."""
    with engine(None, **SHORT) as llm:
        prompts = [p for p in PROMPTS if len(llm.get_tokenizer().encode(p)) < 150][:FEW]
        return prompts, generate(llm, prompts, ENDLESS)


@all_methods
def test_output_equals_vllm_up_to_max_model_len(up_to_the_end, method):
    prompts, expected = up_to_the_end
    with engine(method, **SHORT) as llm:
        assert generate(llm, prompts[:8], ENDLESS) == expected[:8]


def test_output_equals_vllm_whatever_is_drafted(up_to_the_end):
    """Random topologies and sizes in each step, preemption, prefix hits, and the end of context."""
    random, (prompts, expected) = torch.Generator().manual_seed(0), up_to_the_end
    crowded = {"enable_prefix_caching": True, "num_gpu_blocks_override": 24}
    with engine(GROWN, **SHORT, **crowded) as llm:
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
        assert generate(llm, prompts, ENDLESS) == expected
        for _ in range(2):  # so few leave room for what others may hit
            assert generate(llm, prompts[:2], ENDLESS) == expected[:2]
        assert counter(llm, "num_preemptions") > 0
        assert counter(llm, "prefix_cache_hits") > 0
        assert {0, 80} <= sizes
        assert len(sizes) > 20


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda _: TOKEN_RECYCLING, id="default"),
        # The target drafts for itself: the heads of the small draft model are three.
        pytest.param(lambda _: {**SMALL_OUROBOROS, "model": TARGET}, id="ouroboros"),
        pytest.param(
            lambda folder: {**GROWN, "trunk": {"method": "eagle", "model": heads.eagle(folder)}},
            id="eagle",
        ),
    ],
)
def test_output_equals_vllm_with_two_tensor_parallel_ranks(expected, make, monkeypatch, tmp_path):
    use_two_ranks(monkeypatch)
    with engine(make(tmp_path / "head"), tensor_parallel_size=2) as llm:
        assert generate(llm, PROMPTS[:12], GREEDY) == expected[:12]
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
