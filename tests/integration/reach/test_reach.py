"""Wherever vLLM's own methods go: output is vLLM's, token for token, where trees do not go too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from PIL import Image
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.engines import (
    GROWN,
    PAPER,
    SMALL_BUDGET,
    SMALL_OUROBOROS,
    TARGET,
    TOKEN_RECYCLING,
    core,
    counter,
    engine,
    generate,
    make_config,
    mixed_params,
    runner,
)
from tests.integration.models.derived_models import with_windows
from tests.integration.models.random_models import deepseek, lfm2, mamba1
from tests.integration.models.vision_models import SIDE, gemma3_vision, qwen2_5_vl
from tests.integration.reach.reach_rows import (
    ALL,
    COUNT,
    EMBEDDED,
    ENFORCER,
    HALF,
    IN_FLOAT32,
    NO_SINKS,
    ROWS,
    TESTED,
    WINDOW,
    Row,
    copied,
    images,
    texts,
)
from vllm_recycle.core.curve import CHAINS, MeasuredCurve
from vllm_recycle.integration.plugin import register
from vllm_recycle.integration.start import config

HAS_AVX512 = torch.cpu._is_avx512_supported()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Iterator[Callable[[str], dict[str, Any]]]:
    """The settings of an engine with the model of a row, which is made once."""
    folder = tmp_path_factory.mktemp("rows")

    @cache
    def make(name: str) -> dict[str, Any]:
        (folder / name).mkdir()
        return ALL[name].made(folder / name)

    yield make
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def expected(made) -> Callable[[str], tuple[list[Any], list[Any]]]:
    """Prompts of a row, and what vLLM alone says."""

    @cache
    def ask(name: str) -> tuple[list[Any], list[Any]]:
        row = ALL[name]
        with engine(**made(name)) as llm:
            prompts = row.prompts(llm)
            return prompts, generate(llm, prompts, params_of(row, prompts))

    return ask


def params_of(row: Row, prompts: list[Any]) -> list[SamplingParams]:
    max_tokens = 24 if row in ROWS.values() else 40  # chains need no long texts
    return mixed_params(len(prompts), **{"max_tokens": max_tokens, **row.params})


def case(name: str, method: dict[str, Any] = GROWN, note: str = "", **settings: Any) -> Any:
    marks = [pytest.mark.slow] if name in ROWS else []
    if name in ("AWQ", "GPTQ", "fp8 cache"):
        marks.append(pytest.mark.skipif(not HAS_AVX512, reason="vLLM needs AVX-512 for it"))
    if "images" in name:
        is_missing = find_spec("torchvision") is None
        marks.append(pytest.mark.skipif(is_missing, reason="vLLM needs torchvision: make vision"))
    return pytest.param(name, method, settings, id=f"{name}{note}", marks=marks)


@pytest.mark.parametrize(
    ("name", "method", "settings"),
    [
        *map(case, TESTED),
        case("sinks", PAPER, ", paper-80, prompts in chunks", **SMALL_BUDGET),
        case("M-RoPE", PAPER, ", paper-80, chunks", max_model_len=256, **SMALL_BUDGET),
        case("M-RoPE", SMALL_OUROBOROS, ", ouroboros"),
        case("text part", SMALL_OUROBOROS, ", ouroboros"),
        case(
            "text part",
            note=", no audio",
            language_model_only=False,
            limit_mm_per_prompt={"audio": 0},
        ),
        case("windows in some layers", PAPER, ", paper-80, prompts in chunks", **SMALL_BUDGET),
        case("windows in some layers", SMALL_OUROBOROS, ", ouroboros"),
        case(
            "windows in some layers",
            note=", one block table",
            disable_hybrid_kv_cache_manager=True,
        ),
        case("many layers", PAPER, ", paper-80, prompts in chunks", **SMALL_BUDGET),
        case(EMBEDDED, {**GROWN, "tree": "chain", "max_nodes": 8}, ", chains that are asked for"),
    ],
)
def test_output_equals_vllm(name, method, settings, made, expected, monkeypatch):
    row, (prompts, plain) = ALL[name], expected(name)
    params, said = params_of(row, prompts), []
    monkeypatch.setattr(config.logger, "info", lambda *words: said.append(words[0] % words[1:]))
    with engine(method, **made(name) | settings) as llm:
        reasons = [line for line in said if "drafts chains" in line]
        assert [row.reason in line for line in reasons] == [True] * bool(row.reason)
        assert runner(llm).uses_mrope == ("M-RoPE" in name)
        # Drafts are right more often where the text came before.
        assert [generate(llm, prompts, params) for _ in range(2)] == [plain] * 2
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
        layers = runner(llm).compilation_config.static_forward_context.values()
        has_our_attention = any(
            "Tree" in type(getattr(layer, "impl", None)).__name__ for layer in layers
        )
        is_chain = method.get("tree") == "chain"
        assert has_our_attention != (bool(row.reason) or is_chain)
        assert runner(llm).step.trees.are_chains or not is_chain


IN_4_BITS = ("AWQ", "GPTQ") if HAS_AVX512 else ()


@pytest.mark.parametrize("kind", ["experts", "M-RoPE", "W8A8", *IN_4_BITS])
def test_a_kind_of_model_has_answers_of_its_own(kind, expected):
    assert expected(kind)[1] not in (expected(EMBEDDED)[1], expected(HALF)[1])


def test_what_is_other_about_a_model_matters(expected):
    def said(name: str) -> list[Any]:
        return expected(name)[1]

    assert said("text part") == said(EMBEDDED)
    assert said("sinks") != said(NO_SINKS)
    assert said("windows in some layers") != said("windows out of reach") == said(EMBEDDED)
    assert all(len(set(token_ids)) > 8 for (token_ids,) in said("many layers"))


@pytest.mark.parametrize(
    ("name", "num_blocks"), [("windows in some layers", 24), ("windows in all layers", 12)]
)
def test_output_equals_vllm_under_preemption_and_on_prefix_hits(
    name, num_blocks, made, expected, monkeypatch
):
    prompts, plain = expected(name)
    params = params_of(ALL[name], prompts)
    crowded = {"enable_prefix_caching": True, "num_gpu_blocks_override": num_blocks}
    crowded |= {"max_model_len": 192}
    with engine(GROWN, **made(name) | crowded) as llm:
        scheduler, passed = core(llm).scheduler, set()
        schedule = scheduler.schedule

        def watched(*args: Any) -> Any:
            """Whether vLLM took back the first block of a running request."""
            step = schedule(*args)
            for request in scheduler.running:
                groups = scheduler.kv_cache_manager.get_block_ids(request.request_id)
                passed.update(ids[0] == 0 for ids in groups if ids)
            return step

        monkeypatch.setattr(scheduler, "schedule", watched)
        assert generate(llm, prompts * 3, params * 3) == plain * 3
        for _ in range(2):  # so few leave room for what others may hit
            assert generate(llm, prompts[:2], params[:2]) == plain[:2]
        assert True in passed
        assert counter(llm, "num_preemptions") > 0
        assert counter(llm, "prefix_cache_hits") > 0
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


def test_chains_are_drafted_where_trees_never_pay(expected, monkeypatch):
    prompts, plain = expected(EMBEDDED)
    with engine({**TOKEN_RECYCLING, "row_cost": 0.01}) as llm:
        ours, are_chains = runner(llm), set()
        ours.tree_drafter.curve = MeasuredCurve.linear(0.01, ours.tree_drafter.max_rows, [CHAINS])
        compact = ours._compact_kv_cache

        def watched(path: torch.Tensor) -> None:
            are_chains.add(ours.step.trees.are_chains)
            compact(path)

        monkeypatch.setattr(ours, "_compact_kv_cache", watched)
        assert generate(llm, prompts, params_of(Row(), prompts)) == plain
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
        assert are_chains == {True}


def test_what_is_no_token_is_not_learnt_from(tmp_path):
    with engine(GROWN, model=copied(tmp_path / "model"), enable_prompt_embeds=True) as llm:
        table = torch.zeros(12, runner(llm).model_config.get_hidden_size())
        # An owner, since else a request without drafts would not be learnt from.
        params = mixed_params(1, max_tokens=1, extra_args={"owner": "a"})
        generate(llm, [{"prompt_embeds": table}], params)
        assert runner(llm).tree_drafter.state.matrix.num_written == 0


@pytest.mark.skipif(find_spec("torchvision") is None, reason="make vision")
@pytest.mark.parametrize("make", [gemma3_vision, qwen2_5_vl])
def test_what_is_an_image_matters_and_is_not_learnt_from(make, tmp_path):
    params = SamplingParams(temperature=0, max_tokens=24)
    with engine({**GROWN, "scope": "shared"}, model=make(tmp_path / "model")) as llm:
        prompts = images(llm)
        seen = generate(llm, prompts, params)
        for prompt in prompts[1::2]:
            prompt["multi_modal_data"] = {"image": Image.new("RGB", (SIDE, SIDE))}
        dark = generate(llm, prompts, params)
        assert [a == b for a, b in zip(seen, dark, strict=True)] == [True, False] * (COUNT // 2)
        matrix = runner(llm).tree_drafter.state.matrix
        assert matrix.num_written > 0
        assert not matrix.known_entries([llm.model_config.hf_config.image_token_id], 0)


@pytest.mark.parametrize("method", [None, GROWN], ids=["plain", "ours"])
def test_a_request_for_lm_format_enforcer_meets_the_error_that_it_meets_without_us(method):
    follows = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    # The library looks for what vLLM no longer has; else vLLM would refuse its grammars for drafts.
    with engine(method, **ENFORCER) as llm, pytest.raises(ImportError, match="is not installed"):
        generate(llm, texts(llm), follows)


# What is refused.


PLAIN_ROPE = partial(deepseek, rope={"rope_type": "default", "rope_theta": 10000.0})


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (mamba1, {}, "its states are those of MambaMixer, expected"),
        # Without compilation.
        (lfm2, {}, "rotates its first head alone"),
        (PLAIN_ROPE, IN_FLOAT32, "rotates its first head alone"),
    ],
)
def test_models_that_an_engine_finds_not_to_go(make, settings, message, tmp_path):
    settings = {"model": make(tmp_path / "model"), **settings}
    with pytest.raises(NotImplementedError, match=message), engine(TOKEN_RECYCLING, **settings):
        pass


@pytest.mark.parametrize(
    ("windowed", "source", "message"),
    [
        ("ss", SMALL_OUROBOROS["model"], f"a sliding window of {WINDOW} tokens"),
        ("fsfsfs", TARGET, r"in \d KV cache groups, expected one"),
    ],
)
def test_a_draft_model_must_have_full_attention(windowed, source, message, made, tmp_path):
    draft = with_windows(tmp_path / "draft", WINDOW, windowed, source=source)
    method, settings = {**SMALL_OUROBOROS, "model": draft}, made("windows in some layers")
    with pytest.raises(NotImplementedError, match=message), engine(method, **settings):
        pass


@pytest.mark.parametrize(
    ("draft", "flags", "message"),
    [
        (None, {}, "model without --language-model-only"),
        ("text part", {"language_model_only": True}, "a multimodal draft model"),
        ("M-RoPE", {}, "a draft model with M-RoPE"),
    ],
)
def test_models_that_are_refused_before_an_engine_starts(draft, flags, message, made):
    register()
    method = {**SMALL_OUROBOROS, "model": made(draft)["model"]} if draft else PAPER
    with pytest.raises(NotImplementedError, match=message):
        make_config(method, model=made(draft or "text part")["model"], **flags)
