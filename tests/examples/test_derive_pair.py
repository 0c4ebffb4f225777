"""`make pair`: the target is the model it is derived from, at a price; the draft lacks layers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

MODELS = Path(__file__).parents[2] / "examples/models"
sys.path.insert(0, str(MODELS))
import derive_pair  # noqa: E402

MODEL = MODELS / "target"  # six layers


def derive(folder: Path, *arguments: str) -> None:
    derive_pair.main("--model", str(MODEL), "--output", str(folder), *arguments)


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def test_the_target_is_the_model_and_the_draft_lacks_layers(tmp_path):
    derive(tmp_path, "--layers", "9", "--left-out", "2", "4")
    model, target, draft = (
        load(folder) for folder in (MODEL, tmp_path / "pair-target", tmp_path / "pair-draft")
    )
    assert [len(one.model.layers) for one in (model, target, draft)] == [6, 9, 4]
    token_ids = torch.arange(3, 200)[None]
    expected = model(token_ids).logits
    assert torch.equal(target(token_ids).logits, expected)
    assert not torch.equal(draft(token_ids).logits, expected)
    for layer in (4, 2):
        del model.model.layers[layer]
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = 4
    assert torch.equal(draft(token_ids).logits, model(token_ids).logits)


@pytest.mark.parametrize("arguments", [("--layers", "5"), ("--layers", "9", "--left-out", "6")])
def test_layers_that_the_model_has_not_are_refused(tmp_path, arguments):
    with pytest.raises(SystemExit, match="expected at least the 6 layers"):
        derive(tmp_path, *arguments)
    assert not list(tmp_path.iterdir())
