"""A model in the shape of a larger one says what it said."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.integration.engines import EXAMPLES, TARGET

sys.path.insert(0, str(EXAMPLES / "models"))

from derive_wide import Shape, widen, write

TOKENS = torch.arange(40).reshape(2, 20) * 97 % 4096
# Of the target: 256, 704, 6, 4, 2, 64.
WIDE = Shape(384, 800, 7, 12, 4, 128)


def test_logits_are_those_of_the_model(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    expected = model(TOKENS).logits
    write(EXAMPLES / "models" / "target", tmp_path, WIDE, "cpu")
    wide = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    sizes = [getattr(wide.config, name) for name in Shape.__slots__]
    assert sizes == [getattr(WIDE, name) for name in Shape.__slots__]
    assert not wide.config.tie_word_embeddings
    # With the numbers that were not rounded.
    old = Shape(*(getattr(model.config, name) for name in Shape.__slots__))
    parts = widen(
        {k: v.float() for k, v in load_file(f"{TARGET}/model.safetensors").items()}, old, WIDE
    )
    exact = LlamaForCausalLM(LlamaConfig(**json.loads((tmp_path / "config.json").read_text())))
    exact.load_state_dict({name: weight for part in parts for name, weight in part.items()})
    torch.testing.assert_close(exact.float()(TOKENS).logits, expected, rtol=0, atol=1e-4)
    rounded = wide.float()(TOKENS).logits
    assert (rounded - expected).abs().max() < 0.2
    assert rounded.argmax(-1).eq(expected.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_key_value_heads", "head_dim"])
def test_what_does_not_fit_is_refused(name, tmp_path):
    with pytest.raises(SystemExit, match=f"{name}=1"):
        write(EXAMPLES / "models" / "target", tmp_path, replace(WIDE, **{name: 1}), "cpu")
    assert not list(tmp_path.iterdir())
