"""Outputs are vLLM's own, token for token, whatever is asked for and whatever cuts and moves trees.

In float32. What is sampled without a seed is in `test_distribution`.
"""

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
from tests.integration.outputs.test_logprobs import in_about, scored
from vllm_recycle.core.choose import Price
from vllm_recycle.core.curve import TREES
from vllm_recycle.core.draft import Drafts
from vllm_recycle.integration.options.ouroboros import FORWARDS_ON_GPU, SIZES

# Logits of tree rows and of single rows differ in the last bits of float32 (other GEMM shapes).
LOGPROB_TOLERANCE = 2e-4
SEEDED = {"temperature": 0.8, "seed": 7, "max_tokens": 32}
GREEDY = {"temperature": 0.0, "max_tokens": 32}
STOP_TOKENS = {"stop_token_ids": [300, 13, 199]}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5}
PARAMETERS = [
    SEEDED,
    {**SEEDED, "top_k": 20, "top_p": 0.9},
    {**SEEDED, "min_p": 0.1},
    {**SEEDED, **PENALTIES},
    {**GREEDY, "repetition_penalty": 1.2},
    {**GREEDY, "frequency_penalty": 0.7},
    {**GREEDY, "logit_bias": {300: 4.0, 13: -8.0, 199: 2.5}},
    {**GREEDY, "bad_words": ["the", "return", "is"]},
    {**GREEDY, "allowed_token_ids": list(range(3, 1500))},
    {**GREEDY, **STOP_TOKENS, "min_tokens": 24},
    {**GREEDY, **STOP_TOKENS},
    {**GREEDY, "stop": [" the", "\n\n", "return"]},
    {**SEEDED, "stop": [" the", "="], "include_stop_str_in_output": True},
    {**GREEDY, "logprobs": 5},
    {**SEEDED, "logprobs": 3, "prompt_logprobs": 2},
    {**SEEDED, "n": 3},
    {**GREEDY, "max_tokens": 1},
    {**GREEDY, "ignore_eos": True, "max_tokens": 64},
]
# Each prompt is answered greedily before it comes with parameters: drafts of these are deep then.
PROMPTS = read_prompts(len(PARAMETERS)) * 2
PARAMS = [SamplingParams(temperature=0, max_tokens=48)] * len(PARAMETERS)
PARAMS += [SamplingParams(**given) for given in PARAMETERS]
# Of the requests of either kind.
ALL, ODD, EVEN = slice(None), slice(1, None, 2), slice(0, None, 2)
THIRD = slice(0, None, 3)
MAX_NUM_SEQS = 8
# Up to the end of a short context.
ENDLESS = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
SHORT = {"max_model_len": 192, "max_num_seqs": MAX_NUM_SEQS, "block_size": 32}
# Room for a few of the requests at their full length.
CROWDED = {**SHORT, "enable_prefix_caching": True, "num_gpu_blocks_override": 24}


def answers(llm: Any, part: slice = ALL) -> list[dict[str, Any]]:
    """All that is said of each request, or of a part of them; with drafts some are accepted.

    Also of those that come with parameters.
    """
    results, half = [], len(PARAMETERS)
    for first in (0, half):
        before = counter(llm, "spec_decode_num_accepted_tokens")
        prompts, params = (given[first:][:half][part] for given in (PROMPTS, PARAMS))
        results += llm.generate(prompts, params, use_tqdm=False)
        if llm.llm_engine.vllm_config.speculative_config is not None:
            assert counter(llm, "spec_decode_num_accepted_tokens") > before
    return [
        {
            "outputs": [
                (output.token_ids, output.text, output.finish_reason, output.stop_reason)
                for output in result.outputs
            ],
            **scored(result.prompt_logprobs, *(output.logprobs for output in result.outputs)),
        }
        for result in results
    ]


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    with engine() as llm:
        return [in_about(answer, LOGPROB_TOLERANCE) for answer in answers(llm)]


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
def test_outputs_equal_vllms(expected, method):
    with engine(method, max_num_seqs=MAX_NUM_SEQS) as llm:
        assert answers(llm) == expected


@pytest.mark.parametrize(
    ("method", "flags", "part"),
    [
        pytest.param({**TOKEN_RECYCLING, "preset": "paper"}, {},
                     ODD, id="shared, no seed from prompt"),
        pytest.param({**PAPER, "scope": "isolated"}, {}, EVEN, id="isolated"),
        pytest.param({**GROWN, "contexts": [1], "k": 3, "row_cost": 0.1}, {},
                     ODD, id="one token of context, a price by hand"),
        pytest.param(GROWN, SMALL_BUDGET, ALL, id="chunked prefill, cut trees"),
        pytest.param({**OUROBOROS, **SIZES, "max_forwards": FORWARDS_ON_GPU, "row_cost": 0},
                     {"max_num_seqs": 4}, EVEN, id="ouroboros, the paper's sizes",
                     marks=pytest.mark.slow),
        pytest.param({**SMALL_OUROBOROS, "scope": "request", "max_forwards": 2}, {},
                     ODD, id="ouroboros, own pools, two forwards"),
        pytest.param(SMALL_OUROBOROS, SMALL_BUDGET, ODD, id="ouroboros, chunked prefill"),
        pytest.param({**TRUNK, "gamma": 7, "scope": "isolated"}, SMALL_BUDGET,
                     EVEN, id="trunk, isolated, chunked prefill"),
        pytest.param({**HOSTED, "scope": "isolated"}, SMALL_BUDGET,
                     ODD, id="vLLM's trunk, isolated, chunked prefill"),
    ],
)  # fmt: skip
def test_outputs_equal_vllms_with_other_settings(expected, method, flags, part):
    """Also of seeded requests whose prompts come in chunks, of which plain vLLM on a CPU dies."""
    with engine(method, **{"max_num_seqs": MAX_NUM_SEQS, **flags}) as llm:
        assert answers(llm, part) == [*expected[:18][part], *expected[18:][part]]


@pytest.fixture(scope="module")
def up_to_the_end() -> tuple[list[str], list[list[tuple[int, ...]]]]:
    """Prompts, and what follows them in a short context."""
    with engine(None, **SHORT) as llm:
        prompts = [p for p in PROMPTS[:18] if len(llm.get_tokenizer().encode(p)) < 150][:12]
        return prompts, generate(llm, prompts, ENDLESS)


def draft_at_random(llm: Any) -> set[int]:
    """Draft random topologies of random sizes from now on; the sizes that there have been."""
    random, sizes = torch.Generator().manual_seed(0), set()
    proposer = runner(llm).tree_drafter.proposer
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
    return sizes


@pytest.mark.parametrize(
    ("method", "is_random"),
    [
        pytest.param(GROWN, False, id="grown", marks=pytest.mark.versions),
        pytest.param(GROWN, True, id="whatever is drafted"),
        pytest.param(SMALL_OUROBOROS, False, id="ouroboros"),
        pytest.param(TRUNK, False, id="trunk"),
        pytest.param(HOSTED, False, id="vLLM's trunk"),
    ],
)
def test_outputs_equal_vllms_under_preemption_on_prefix_hits_and_to_the_end(
    up_to_the_end, method, is_random
):
    prompts, expected = up_to_the_end
    with engine(method, **CROWDED) as llm:
        sizes = draft_at_random(llm) if is_random else None
        assert generate(llm, prompts, ENDLESS) == expected
        assert counter(llm, "num_preemptions") > 0
        hits = counter(llm, "prefix_cache_hits")
        for _ in range(2):  # so few leave room for what others may hit
            assert generate(llm, prompts[:2], ENDLESS) == expected[:2]
        assert counter(llm, "prefix_cache_hits") > hits
        generate(llm, prompts[:1], ENDLESS)  # what ended is released with the next step
        assert len(runner(llm).req_state_indices) == 1
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
    assert sizes is None or ({0, 80} <= sizes and len(sizes) > 20)


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize(
    "make",
    [
        # The target drafts for itself: the heads of the small draft model are three.
        pytest.param(lambda _: {**SMALL_OUROBOROS, "model": TARGET}, id="ouroboros"),
        pytest.param(
            lambda folder: GROWN | {"trunk": {"method": "eagle", "model": heads.eagle(folder)}},
            id="eagle",
        ),
    ],
)
def test_outputs_equal_vllms_with_two_tensor_parallel_ranks(expected, make, monkeypatch, tmp_path):
    use_two_ranks(monkeypatch)
    with engine(make(tmp_path / "head"), tensor_parallel_size=2) as llm:
        assert answers(llm, THIRD) == [*expected[:18][THIRD], *expected[18:][THIRD]]
