"""Recurrent layers see chains as plain decoding; their states are behind what was accepted."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.engines import (
    GROWN,
    SMALL_BUDGET,
    TOKEN_RECYCLING,
    counter,
    engine,
    generate,
    mixed_params,
    read_prompts,
    runner,
    use_two_ranks,
    watch_steps,
)
from tests.integration.models.random_models import falcon_h1, lfm2, mamba2
from tests.integration.reach.reach_rows import ROTATED_BY_TORCH
from tests.integration.reach.reach_table import NGRAM

PROMPTS = read_prompts(8, max_words=60)
TOKENS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def states_at_the_end(llm: Any) -> tuple[Any, dict[str, list[torch.Tensor]]]:
    """The tokens of a request, and the states that each recurrent layer has behind them."""
    steps, states = watch_steps(llm), {}
    tokens = generate(llm, PROMPTS[:1], TOKENS)
    [new] = steps[0].scheduled_new_reqs
    layers = runner(llm).compilation_config.static_forward_context
    groups = runner(llm).kv_cache_config.kv_cache_groups
    for blocks, group in zip(new.block_ids, groups, strict=True):
        for name in group.layer_names:
            if isinstance(layers[name], MambaBase):
                states[name] = [state[blocks[0]].clone() for state in layers[name].kv_cache]
    return tokens, states


MODELS = {"Mamba2": (falcon_h1, {}), "short convolutions": (lfm2, ROTATED_BY_TORCH)}


@pytest.mark.parametrize(("make", "settings"), MODELS.values(), ids=MODELS)
def test_states_are_those_of_plain_decoding(make, settings, tmp_path):
    settings = {"model": make(tmp_path / "model"), **settings}
    with engine(**settings) as llm:
        tokens, expected = states_at_the_end(llm)
    with engine(GROWN, **settings) as llm:
        ours, states = states_at_the_end(llm)
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
    assert ours == tokens
    assert len(states) == 2
    # The window of a convolution and the state of Mamba2, whose size is some 0.1.
    torch.testing.assert_close(states, expected, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return falcon_h1(tmp_path_factory.mktemp("model") / "falcon")


@pytest.mark.slow
def test_a_row_has_a_price_and_vllm_itself_gives_other_tokens(model):
    """Where it does not any more, `recurrent` can go."""
    with engine(model=model) as llm:
        expected = generate(llm, PROMPTS, TOKENS)
    with engine(TOKEN_RECYCLING, model=model) as llm:
        assert runner(llm).tree_drafter.statistics()["row_cost"] > 0
        assert generate(llm, PROMPTS, TOKENS) == expected
    with engine(NGRAM, model=model) as llm:
        assert generate(llm, PROMPTS, TOKENS) != expected


@pytest.mark.slow
@pytest.mark.parametrize(("make", "settings"), MODELS.values(), ids=MODELS)
def test_output_equals_vllm_beside_prompts_in_chunks(make, settings, tmp_path):
    """Up to the end of a short context; with prefix caching drafts end where blocks do."""
    settings = settings | {"model": make(tmp_path / "model")}
    settings |= {"max_model_len": 192, "max_num_seqs": 6}
    params = mixed_params(len(PROMPTS), max_tokens=1000)
    with engine(**settings) as llm:
        expected = generate(llm, PROMPTS, params)
    for caches_prefixes in (False, True):
        given = {**settings, **SMALL_BUDGET, "enable_prefix_caching": caches_prefixes}
        with engine(GROWN, **given) as llm:
            steps = watch_steps(llm)
            assert [generate(llm, PROMPTS, params) for _ in range(2)] == [expected] * 2
            assert counter(llm, "spec_decode_num_accepted_tokens") > 0
            drafts = [draft for s in steps for draft in s.scheduled_spec_decode_tokens.values()]
            assert {*map(len, drafts)} == {1, 2, 3, 4}


@pytest.mark.nightly
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_each_rank_has_a_part_of_a_short_convolution(monkeypatch, tmp_path):
    use_two_ranks(monkeypatch)
    settings = {"model": lfm2(tmp_path / "model"), "tensor_parallel_size": 2, **ROTATED_BY_TORCH}
    with engine(**settings) as llm:
        expected = generate(llm, PROMPTS, TOKENS)
    with engine(GROWN, **settings) as llm:
        assert generate(llm, PROMPTS, TOKENS) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


@pytest.mark.slow
def test_drafts_that_a_grammar_cuts(tmp_path):
    model = mamba2(tmp_path / "model")
    regex = StructuredOutputsParams(regex="(ab|cd|a){20}")
    follows = SamplingParams(temperature=0, max_tokens=30, structured_outputs=regex)
    params = [follows, TOKENS] * 3
    with engine(model=model) as llm:
        expected = generate(llm, PROMPTS[:6], params)
    with engine(GROWN, model=model) as llm:
        assert [generate(llm, PROMPTS[:6], params) for _ in range(2)] == [expected] * 2
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
