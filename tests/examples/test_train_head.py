"""The head of examples/models/train_head.py says in vLLM what it learnt, and changes no output."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams

from tests.integration.engines import (
    EXAMPLES,
    TARGET,
    engine,
    generate,
    read_prompts,
    watched_chains,
)

sys.path.insert(0, str(EXAMPLES / "models"))

import train_head

PROMPTS = read_prompts(8)
GREEDY = SamplingParams(temperature=0, max_tokens=32)


@pytest.mark.nightly
def test_vllm_drafts_what_the_trained_layer_says(tmp_path, monkeypatch):
    # Trained for some seconds on what lies in the file of texts, which is not gone beyond.
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    texts = [tokenizer.encode(prompt)[:128] for prompt in read_prompts(60)]
    (tmp_path / "head.texts.json").write_text(json.dumps([texts]))
    head = str(tmp_path / "head")
    train_head.main(f"--model={TARGET}", f"--output={head}", "--tokens=1000", "--epochs=8")
    trunk = {"method": "eagle", "model": head, "num_speculative_tokens": 3}
    with engine() as llm:
        expected = generate(llm, PROMPTS, GREEDY)
    with (
        watched_chains(monkeypatch) as chains,
        engine({"method": "token_recycling", "trunk": trunk, "row_cost": 0}) as llm,
    ):
        assert generate(llm, PROMPTS, GREEDY) == expected
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    layer = train_head.Head(target.config)
    weights = load_file(f"{head}/model.safetensors")
    renamed = {name.replace("layers.0.", "layer."): weights[name].float() for name in weights}
    layer.load_state_dict(renamed)
    texts = [*chains][:40]
    said = []
    for read in train_head.read(target, [[*text] for text in texts]):
        states = layer(read.embedded[None, 1:], read.states[None, :-1])
        said.append(int(target.lm_head(states[0, -1]).argmax()))
    assert len(texts) > 20
    assert len(set(said)) > 5
    assert said == [chains[text][0] for text in texts]
