"""The head of examples/models/train_head.py says in vLLM what it learnt, and changes no output."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams

from tests.integration.engines import TARGET, engine, generate, read_prompts, watched_chains

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES / "models"))

import train_head  # noqa: E402

PROMPTS = read_prompts(8)
GREEDY = SamplingParams(temperature=0, max_tokens=32)


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> str:
    """Trained for some seconds on what lies in the file of texts, which is not gone beyond."""
    folder = tmp_path_factory.mktemp("trained") / "head"
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    lines = (EXAMPLES / "prompts" / "humaneval.jsonl").read_text().splitlines()
    lines += (EXAMPLES / "prompts" / "gsm8k.jsonl").read_text().splitlines()
    texts = [tokenizer.encode(json.loads(line)["prompt"])[:128] for line in lines]
    folder.with_suffix(".texts.json").write_text(json.dumps([texts]))
    flags = {"model": TARGET, "output": folder, "tokens": 1000, "epochs": 10}
    train_head.main(*(f"--{name}={value}" for name, value in flags.items()))
    return str(folder)


@pytest.mark.slow
def test_vllm_drafts_what_the_trained_layer_says(head, monkeypatch):
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
