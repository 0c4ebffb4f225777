"""What is derived of a model says what it said: in a larger shape, or with more layers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.integration.engines import EXAMPLES, TARGET

sys.path.insert(0, str(EXAMPLES / "models"))

import derive_pair
from derive_wide import Shape, widen, write

TOKENS = torch.arange(40).reshape(2, 20) * 97 % 4096
# Of the target: 256, 704, 6, 4, 2, 64.
WIDE = Shape(384, 800, 7, 12, 4, 128)


def load(folder: Path | str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def shape_of(model: torch.nn.Module) -> Shape:
    return Shape(*(getattr(model.config, name) for name in Shape.__slots__))


@torch.inference_mode()
def test_logits_of_a_wide_model_are_those_of_the_model(tmp_path):
    model = load(TARGET)
    expected = model(TOKENS).logits
    write(Path(TARGET), tmp_path, WIDE, "cpu")
    wide = load(tmp_path, torch.bfloat16)
    assert shape_of(wide) == WIDE
    assert not wide.config.tie_word_embeddings
    # With the numbers that were not rounded.
    weights = load_file(f"{TARGET}/model.safetensors")
    parts = widen({k: v.float() for k, v in weights.items()}, shape_of(model), WIDE)
    exact = LlamaForCausalLM(LlamaConfig(**json.loads((tmp_path / "config.json").read_text())))
    exact.load_state_dict({name: weight for part in parts for name, weight in part.items()})
    torch.testing.assert_close(exact.float()(TOKENS).logits, expected, rtol=0, atol=1e-4)
    rounded = wide.float()(TOKENS).logits
    assert (rounded - expected).abs().max() < 0.2
    assert rounded.argmax(-1).eq(expected.argmax(-1)).float().mean() > 0.9


@torch.inference_mode()
def test_the_target_of_a_pair_is_the_model_and_the_draft_lacks_layers(tmp_path):
    derive_pair.main(
        *("--model", TARGET, "--output", str(tmp_path), "--layers", "9", "--left-out", "2", "4")
    )
    folders = (TARGET, tmp_path / "pair-target", tmp_path / "pair-draft")
    model, target, draft = map(load, folders)
    assert [len(one.model.layers) for one in (model, target, draft)] == [6, 9, 4]
    expected = model(TOKENS).logits
    assert torch.equal(target(TOKENS).logits, expected)
    assert not torch.equal(draft(TOKENS).logits, expected)
    for layer in (4, 2):
        del model.model.layers[layer]
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = 4
    assert torch.equal(draft(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("arguments", [("--layers", "5"), ("--layers", "9", "--left-out", "6")])
def test_layers_that_the_model_has_not_are_refused(tmp_path, arguments):
    with pytest.raises(SystemExit, match="expected at least the 6 layers"):
        derive_pair.main("--model", TARGET, "--output", str(tmp_path), *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_key_value_heads", "head_dim"])
def test_a_shape_that_does_not_fit_is_refused(name, tmp_path):
    with pytest.raises(SystemExit, match=f"{name}=1"):
        write(Path(TARGET), tmp_path, replace(WIDE, **{name: 1}), "cpu")
    assert not list(tmp_path.iterdir())
