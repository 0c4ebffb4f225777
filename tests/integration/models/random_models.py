"""Small models of many architectures, with random weights: each name makes one in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.integration.models.derived_models import (
    EXPERTS,
    change_tokenizer,
    random_weights,
    write_model,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    **dict.fromkeys(("mscale", "mscale_all_dim"), 0.7),
}
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 16}


def whisper(folder: Path) -> str:
    """A Whisper with random weights."""
    config = transformers.WhisperConfig(
        vocab_size=SMALL["vocab_size"],
        num_mel_bins=16,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=100,
        architectures=["WhisperForConditionalGeneration"],
        **dict.fromkeys(("decoder_start_token_id", "bos_token_id"), 1),
        eos_token_id=2,
        pad_token_id=0,
        begin_suppress_tokens=None,
    )
    weights = random_weights(config, norms=1.0, kind=transformers.WhisperForConditionalGeneration)
    write_model(folder, config.to_dict(), weights=weights)
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2).save_pretrained(folder)
    change_tokenizer(folder, processor_class="WhisperProcessor")
    return str(folder)


def random_model(
    name: str,
    *,
    norms: float = 1.0,
    std: float = 0.05,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Callable[[Path], str]:
    """Makes a model with random weights in a folder, of a configuration of `transformers`."""
    architectures = [f"{name.removesuffix('Text')}ForCausalLM"]

    def make(folder: Path) -> str:
        config = getattr(transformers, f"{name}Config")(architectures=architectures, **settings)
        weights = random_weights(config, norms=norms, std=std)
        weights = {key: weight.to(dtype) for key, weight in weights.items()}
        return write_model(folder, config.to_dict(), weights=weights)

    return make


def gpt_oss(folder: Path, window: int, sinks: list[float]) -> str:
    """A GPT-OSS of windowed layers and full ones in turn, with random weights and these sinks."""
    heads = {"num_attention_heads": len(sinks), "num_key_value_heads": 2, "head_dim": 32}
    config = transformers.GptOssConfig(
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=4,
        **heads,
        architectures=["GptOssForCausalLM"],
        vocab_size=SMALL["vocab_size"],
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=window,
    )
    weights = random_weights(config, norms=1.0)
    of_layers = {name: torch.tensor(sinks) for name in weights if name.endswith(".sinks")}
    return write_model(folder, config.to_dict(), weights=weights | of_layers)


def deepseek(folder: Path, *, rope: dict[str, Any] = YARN) -> str:
    """A DeepSeek-V2 (MLA) of dense layers."""
    return random_model(
        "DeepseekV2",
        **SMALL | {"num_key_value_heads": 2, "head_dim": None},
        q_lora_rank=None,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=EXPERTS,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=SMALL["num_hidden_layers"],
        moe_intermediate_size=64,
        rope_parameters=rope,
    )(folder)


# Attention with a soft cap. The norms of a Gemma to 3 multiply by one more than their numbers.
gemma2 = random_model("Gemma2", norms=0.0, **SMALL, query_pre_attn_scalar=32, sliding_window=64)
# Five windowed layers and a full one.
gemma3 = random_model(
    "Gemma3Text",
    norms=0.0,
    **SMALL | {"num_hidden_layers": 6},
    sliding_window=40,
    query_pre_attn_scalar=32,
    tie_word_embeddings=False,
)
# Its last two layers read the KV cache of the second.
gemma4 = random_model(
    "Gemma4Text",
    **SMALL | {"intermediate_size": 64, "num_hidden_layers": 4, "max_position_embeddings": 2048},
    vocab_size_per_layer_input=SMALL["vocab_size"],
    hidden_size_per_layer_input=8,
    num_kv_shared_layers=2,
    layer_types=["full_attention"] * 4,
    global_head_dim=32,
)
# Layers with chunked attention and one without.
llama4 = random_model(
    "Llama4Text",
    **SMALL | {"num_hidden_layers": 4},
    intermediate_size_mlp=128,
    num_local_experts=EXPERTS,
    attention_chunk_size=64,
    no_rope_layers=[1, 1, 0, 1],
    attn_temperature_tuning=False,
    use_qk_norm=False,
)
# Positions are slopes (ALiBi).
bloom = random_model("Bloom", vocab_size=SMALL["vocab_size"], hidden_size=64, n_layer=2, n_head=2)
mamba1 = random_model("Mamba", vocab_size=SMALL["vocab_size"], hidden_size=64, num_hidden_layers=1)
mamba2 = random_model(
    "Mamba2",
    vocab_size=SMALL["vocab_size"],
    hidden_size=64,
    state_size=16,
    head_dim=32,
    num_heads=4,
    n_groups=1,
    num_hidden_layers=2,
)
# Granite 4, of two layers with Mamba2 and one with attention.
granite_hybrid = random_model(
    "GraniteMoeHybrid",
    **SMALL | {"num_hidden_layers": 3},
    **MAMBA,
    layer_types=["mamba", "attention", "mamba"],
    num_local_experts=0,
    shared_intermediate_size=64,
    position_embedding_type="nope",
    attention_multiplier=0.2,
)
# Layers have attention and Mamba2 side by side; without the norm little depends on the states.
falcon_h1 = random_model("FalconH1", **SMALL, **MAMBA, mamba_d_ssm=128, mamba_rms_norm=True)
# Two layers with short convolutions and one with attention.
lfm2 = random_model(
    "Lfm2",
    **SMALL | {"num_hidden_layers": 3},
    layer_types=["conv", "full_attention", "conv"],
    **dict.fromkeys(("conv_dim", "conv_dim_out", "block_dim"), SMALL["hidden_size"]),
    block_auto_adjust_ff_dim=False,
    tie_word_embeddings=False,
)
# Gated delta nets and a layer with attention.
qwen3_next = random_model(
    "Qwen3Next",
    norms=0.0,
    **SMALL | {"num_hidden_layers": 3},
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
)
