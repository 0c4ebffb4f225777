"""Small models with recurrent layers, whose weights are random."""

from __future__ import annotations

from pathlib import Path

from derived_models import EXPERTS, SMALL, random_weights, write_model
from transformers import (
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    Qwen3NextConfig,
)

MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}


def mamba2(folder: Path) -> str:
    """A Mamba with random weights."""
    config = Mamba2Config(
        architectures=["Mamba2ForCausalLM"],
        vocab_size=SMALL["vocab_size"],
        hidden_size=64,
        state_size=16,
        expand=2,
        head_dim=32,
        num_heads=4,
        n_groups=1,
        num_hidden_layers=2,
    )
    return write_model(folder, config.to_dict(), weights=random_weights(config, norms=1.0))


def mamba1(folder: Path) -> str:
    """A Mamba of the first kind with random weights."""
    config = MambaConfig(
        architectures=["MambaForCausalLM"],
        vocab_size=SMALL["vocab_size"],
        hidden_size=64,
        num_hidden_layers=1,
    )
    return write_model(folder, config.to_dict(), weights=random_weights(config, norms=1.0))


def granite_hybrid(folder: Path) -> str:
    """A Granite 4 of two layers with Mamba2 and one with attention, with random weights."""
    config = GraniteMoeHybridConfig(
        **SMALL | {"num_hidden_layers": 3},
        **MAMBA,
        architectures=["GraniteMoeHybridForCausalLM"],
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=0,
        shared_intermediate_size=64,
        position_embedding_type="nope",
        attention_multiplier=0.2,
    )
    return write_model(folder, config.to_dict(), weights=random_weights(config, norms=1.0))


def falcon_h1(folder: Path) -> str:
    """A Falcon-H1, whose layers have attention and Mamba2 side by side, with random weights."""
    config = FalconH1Config(
        **SMALL,
        **MAMBA,
        architectures=["FalconH1ForCausalLM"],
        mamba_d_ssm=128,
        mamba_rms_norm=True,  # else little depends on the states
    )
    return write_model(folder, config.to_dict(), weights=random_weights(config, norms=1.0))


def lfm2(folder: Path) -> str:
    """An LFM2 of two layers with short convolutions and one with attention, random weights."""
    config = Lfm2Config(
        **SMALL | {"num_hidden_layers": 3},
        architectures=["Lfm2ForCausalLM"],
        layer_types=["conv", "full_attention", "conv"],
        **dict.fromkeys(("conv_dim", "conv_dim_out", "block_dim"), SMALL["hidden_size"]),
        block_ff_dim=SMALL["intermediate_size"],
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    )
    return write_model(folder, config.to_dict(), weights=random_weights(config, norms=1.0))


def qwen3_next(folder: Path) -> str:
    """A Qwen3-Next of gated delta nets and a layer with attention, with random weights."""
    config = Qwen3NextConfig(
        **SMALL | {"num_hidden_layers": 3},
        architectures=["Qwen3NextForCausalLM"],
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    )
    return write_model(folder, config.to_dict(), weights=random_weights(config, norms=0.0))
