"""Where trees do not go, chains do, as vLLM's own methods: output is vLLM's, token for token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from derived_models import (
    AUDIO,
    bloom,
    config_of,
    deepseek,
    gemma2,
    llama4,
    qwen2_audio,
    whisper,
    write_model,
)
from engines import (
    GROWN,
    TARGET,
    TOKEN_RECYCLING,
    counter,
    engine,
    generate,
    mixed_params,
    read_prompts,
    runner,
)
from recurrent_models import falcon_h1, granite_hybrid, lfm2, mamba2, qwen3_next

from vllm_recycle.integration import config

COUNT = 6
WAVE = np.sin(np.arange(16_000) / 20).astype(np.float32), 16_000
BEGIN, END, SOUND = AUDIO


def texts(_: Any) -> list[Any]:
    return read_prompts(COUNT, max_words=60)


def audio(_: Any) -> list[Any]:
    return [
        {"prompt": BEGIN + SOUND + END + text, "multi_modal_data": {"audio": WAVE}}
        if i % 2
        else text
        for i, text in enumerate(read_prompts(COUNT, max_words=60))
    ]


def speech(_: Any) -> list[Any]:
    return [
        {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": WAVE}},
            "decoder_prompt": {"prompt_token_ids": [1] + [7, 8, 9] * (2 + i)},
        }
        for i in range(COUNT)
    ]


def embeddings(llm: Any) -> list[Any]:
    """Prompts of embeddings and of tokens in turn."""
    [table] = llm.apply_model(lambda model: model.model.embed_tokens.weight.clone())
    prompts = read_prompts(COUNT, max_words=60)
    ids = [llm.get_tokenizer()(prompt).input_ids for prompt in prompts]
    return [
        {"prompt_embeds": table[one]} if i % 2 else {"prompt_token_ids": one}
        for i, one in enumerate(ids)
    ]


def copied(folder: Path) -> str:
    """The target, for itself: with embeddings vLLM adds a token to a tokenizer that it keeps."""
    return write_model(folder, config_of(TARGET))


STATES = "a hybrid or Mamba model"
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
# By row: what makes the model, or none for the target; the settings of its engines; the prompts;
# and how the start-up line calls the reason.
ROWS: dict[str, tuple[Callable[[Path], str] | None, dict[str, Any], Any, str]] = {
    "soft cap": (gemma2, {}, texts, "soft cap"),
    "chunked attention": (llama4, {"block_size": 32}, texts, "chunked"),
    "ALiBi": (bloom, {}, texts, "ALiBi"),
    "fp8 cache": (None, {"kv_cache_dtype": "fp8"}, texts, "--kv-cache-dtype fp8"),
    "KV connector": (None, {"kv_transfer_config": CONNECTOR}, texts, "--kv-transfer-config"),
    "embeddings": (copied, {"enable_prompt_embeds": True}, embeddings, "--enable-prompt-embeds"),
    "audio": (partial(qwen2_audio, hears=True), {}, audio, "a multimodal model"),
    "MLA": (deepseek, {}, texts, "MLA"),
    "Mamba2": (mamba2, {}, texts, STATES),
    "Mamba2, attention and prefix caching (Granite 4)": (
        granite_hybrid,
        {"enable_prefix_caching": True},
        texts,
        STATES,
    ),
    "Mamba2 beside attention (Falcon-H1)": (falcon_h1, {}, texts, STATES),
    "gated delta nets (Qwen3-Next)": (qwen3_next, {"dtype": "bfloat16"}, texts, STATES),
    "encoder-decoder": (whisper, {"max_model_len": 128}, speech, "a multimodal model"),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_output_equals_vllm_where_trees_do_not_go(row, tmp_path, monkeypatch):
    make, settings, prompts_of, reason = ROWS[row]
    if row == "fp8 cache" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM needs AVX-512 for it")
    model = TARGET if make is None else make(tmp_path / "model")
    if "kv_transfer_config" in settings:
        place = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")}}
        settings = {"kv_transfer_config": CONNECTOR | place}
    params = mixed_params(COUNT, max_tokens=40)
    with engine(model=model, **settings) as llm:
        prompts = prompts_of(llm)
        expected = generate(llm, prompts, params)
    said = []
    monkeypatch.setattr(config.logger, "info", lambda *words: said.append(words[0] % words[1:]))
    with engine(GROWN, model=model, **settings) as llm:
        assert any("drafts chains" in line and reason in line for line in said)
        # Drafts are right more often where the text came before.
        assert [generate(llm, prompts, params) for _ in range(2)] == [expected] * 2
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
        assert not has_our_attention(llm)


def has_our_attention(llm: Any) -> bool:
    layers = runner(llm).compilation_config.static_forward_context.values()
    return any("Tree" in type(getattr(layer, "impl", None)).__name__ for layer in layers)


def test_chains_can_be_asked_for_and_are_verified_as_vllm_does():
    prompts, params = read_prompts(COUNT), mixed_params(COUNT, max_tokens=40)
    with engine() as llm:
        expected = generate(llm, prompts, params)
    with engine({**GROWN, "tree": "chain", "max_nodes": 8}) as llm:
        assert generate(llm, prompts, params) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
        assert not has_our_attention(llm)
        assert runner(llm).step.are_chains


def test_in_a_step_of_chains_attention_is_that_of_vllm():
    prompts, params = read_prompts(COUNT), mixed_params(COUNT, max_tokens=40)
    with engine() as llm:
        expected = generate(llm, prompts, params)
    with engine({**TOKEN_RECYCLING, "row_cost": 0.01}) as llm:
        ours = runner(llm)
        # A price at which trees never pay, and another at which chains always do.
        linear = ours.drafter.step_times["trees"]
        ours.drafter.step_times = {"chains": linear}
        seen = []
        hand_over = watch_builders(ours, seen)
        assert generate(llm, prompts, params) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
        assert seen
        assert not any(seen)
        hand_over()


def watch_builders(ours: Any, seen: list[bool]) -> Callable[[], None]:
    """Note of all metadata that are built whether they have trees."""
    builder = ours.attn_groups[0][0].get_metadata_builder()
    build = builder.build

    def watched(*args: Any, **kwargs: Any) -> Any:
        metadata = build(*args, **kwargs)
        seen.append(hasattr(metadata, "trees"))
        return metadata

    builder.build = watched
    return lambda: setattr(builder, "build", build)


def test_what_is_no_token_is_not_learnt_from(tmp_path):
    with engine(GROWN, model=copied(tmp_path / "model"), enable_prompt_embeds=True) as llm:
        table = torch.zeros(12, runner(llm).model_config.get_hidden_size())
        generate(llm, [{"prompt_embeds": table}], mixed_params(1, max_tokens=1))
        assert runner(llm).drafter.state.matrix.num_written == 0


def test_a_model_with_other_states_is_refused(tmp_path):
    with (
        pytest.raises(NotImplementedError, match="its states are those of ShortConv, expected"),
        engine(TOKEN_RECYCLING, model=lfm2(tmp_path / "model")),
    ):
        pass


def test_a_model_whose_heads_vllm_does_not_rotate_is_refused(tmp_path):
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    with (
        pytest.raises(NotImplementedError, match="rotates its first head alone"),
        engine(TOKEN_RECYCLING, model=deepseek(tmp_path / "model", rope=plain)),
    ):
        pass
