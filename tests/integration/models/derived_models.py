"""Small models of other architectures, with the weights of the embedded target.

Text of the target's weights is natural enough that drafts are accepted, and a layer's kind matters
to it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.integration.engines import TARGET

WEIGHTS = "model.safetensors"
AUDIO = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
EXPERTS = 4


def write_model(
    folder: Path,
    config: dict[str, Any],
    *,
    weights: dict[str, torch.Tensor] | None = None,
    source: str = TARGET,
) -> str:
    """A model with the tokenizer of another, and its weights where none are given."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", WEIGHTS):
        if name != WEIGHTS or weights is None:
            (folder / name).symlink_to(Path(source) / name)
    if weights is not None:
        save_file(weights, folder / WEIGHTS, {"format": "pt"})
    return str(folder)


def config_of(model: str) -> dict[str, Any]:
    return json.loads((Path(model) / "config.json").read_text())


def with_windows(folder: Path, window: int, windowed: str, *, source: str = TARGET) -> str:
    """A Llama with a sliding window in the layers that are `s` in a string such as `fss`."""
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    layers = {"layer_types": [kinds[letter] for letter in windowed], "sliding_window": window}
    return write_model(folder, config_of(source) | layers, source=source)


def mistral(folder: Path, window: int) -> str:
    """One sliding window for the whole model, as Mistral-7B-v0.1 has it."""
    architecture = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return write_model(folder, config_of(TARGET) | architecture | {"sliding_window": window})


def mixtral(folder: Path) -> str:
    """Experts that are the target's MLP, each with other noise, and a router."""
    architecture = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    sizes = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}
    generator = torch.Generator().manual_seed(0)

    def noisy(weight: torch.Tensor) -> torch.Tensor:
        std = float(weight.float().std()) / 4
        noise = torch.empty(weight.shape).normal_(std=std, generator=generator)
        return (weight.float() + noise).bfloat16()

    weights = {}
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for name, weight in load_file(Path(TARGET) / WEIGHTS).items():
        if ".mlp." not in name:
            weights[name] = weight
            continue
        layer, projection = name.split(".mlp.")[0], name.split(".")[-2]
        moe = f"{layer}.block_sparse_moe"
        for expert in range(EXPERTS):
            weights[f"{moe}.experts.{expert}.{names[projection]}.weight"] = noisy(weight)
        router = torch.empty(EXPERTS, config_of(TARGET)["hidden_size"])
        weights[f"{moe}.gate.weight"] = router.normal_(generator=generator).bfloat16()
    return write_model(folder, config_of(TARGET) | architecture | sizes, weights=weights)


def qwen2_audio(folder: Path, *, hears: bool = False) -> str:
    """The target as the text part of a Qwen2-Audio, whose ear has random weights or none."""
    text, weights = as_qwen2(TARGET)
    if hears:
        make_room(text, weights, len(AUDIO))
    sizes = {"d_model": 32, "encoder_ffn_dim": 64}
    layers = {"encoder_layers": 1, "encoder_attention_heads": 2, "num_mel_bins": 16}
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "text_config": text,
        "audio_config": {"model_type": "qwen2_audio_encoder", **sizes, **layers},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "audio_token_index": text["vocab_size"] - 1,  # the last of AUDIO
    }
    wrapped = {f"language_model.{name}": weight for name, weight in weights.items()}
    if hears:
        made = transformers.Qwen2AudioConfig.from_dict(config)
        ear = random_weights(made, norms=1.0, kind=transformers.Qwen2AudioForConditionalGeneration)
        wrapped |= {
            name.removeprefix("model."): weight
            for name, weight in ear.items()
            if "audio_tower" in name or "projector" in name
        }
    write_model(folder, config, weights=wrapped)
    if hears:
        transformers.WhisperFeatureExtractor(feature_size=16).save_pretrained(folder)
        add_tokens(folder, AUDIO)
        change_tokenizer(folder, processor_class="Qwen2AudioProcessor")
    return str(folder)


def make_room(text: dict[str, Any], weights: dict[str, torch.Tensor], count: int) -> None:
    """Enlarge the vocabulary of a model by some tokens, whose embeddings are 0."""
    embedding = "model.embed_tokens.weight"
    weights[embedding] = torch.nn.functional.pad(weights[embedding], (0, 0, 0, count))
    text["vocab_size"] += count


def add_tokens(folder: Path, tokens: Sequence[str]) -> None:
    """Give the tokenizer of a model, which is linked, some special tokens more."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    size, flags = len(content["model"]["vocab"]), ("lstrip", "rstrip", "single_word", "normalized")
    content["added_tokens"] += [
        {"id": size + i, "content": token, "special": True, **dict.fromkeys(flags, False)}
        for i, token in enumerate(tokens)
    ]
    path.unlink()
    path.write_text(json.dumps(content))


def change_tokenizer(folder: Path, **keys: Any) -> None:
    """Put keys into the configuration of a tokenizer."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | keys
    path.unlink()  # it is a link
    path.write_text(json.dumps(config))


def mrope_of(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding of a model, with dimensions for time, height and width."""
    eighth = config["head_dim"] // 8
    return {**config["rope_parameters"], "mrope_section": [eighth, eighth, 2 * eighth]}


def as_qwen2(source: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and weights of a Llama as those of a Qwen2, whose biases are 0."""
    config = config_of(source)
    architecture = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    weights = load_file(Path(source) / WEIGHTS)
    projections = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    biases = {
        name.replace("weight", "bias"): torch.zeros(len(weight))
        for name, weight in weights.items()
        if name.endswith(projections)
    }
    return config | architecture, weights | biases


def random_weights(
    config: Any, *, norms: float, std: float = 0.05, kind: type | None = None
) -> dict[str, torch.Tensor]:
    """Those of a model of `transformers`, of norms one number; `kind` if it only writes."""
    with torch.device("meta"):
        model = (
            transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
        )
        shapes = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.full(weight.shape, norms)
        if "norm" in name
        else torch.empty(weight.shape).normal_(std=std, generator=generator)
        for name, weight in shapes.items()
    }
