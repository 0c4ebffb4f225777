"""train_pair.py: a few steps on little text give two directories that load as one pair."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = EXAMPLES / "models/train_pair.py"
MODELS = ("target", "draft")
STEPS = (3, 2)
# The loss of a uniform guess, plus what a random initialization and three steps may be off by.
LOSS_BOUND = math.log(4096) + 0.5


def write_gsm8k(path: Path, items: int) -> Path:
    rows = (
        {
            "question": f"Tom has {n} boxes with 4 apples each. How many apples does he have?",
            "answer": f"He has {n}*4=<<{n}*4={4 * n}>>{4 * n} apples.\n#### {4 * n}",
        }
        for n in range(items)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run_script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The output directory and the report of one tiny run."""
    directory = tmp_path_factory.mktemp("train_pair")
    done = run_script(
        *("--gsm8k", write_gsm8k(directory / "train.jsonl", items=40)),
        *("--steps", *map(str, STEPS), "--max-megabytes", "0.4", "--output", directory),
    )
    assert done.returncode == 0, done.stderr
    return directory, json.loads(done.stdout.splitlines()[-1])


def test_the_last_line_reports_steps_and_a_plausible_loss(trained: tuple[Path, dict]) -> None:
    _, report = trained
    assert report["gsm8k_items"] == 40
    for name, steps in zip(MODELS, STEPS, strict=True):
        assert report[name]["steps"] == steps
        assert report[name]["minutes"] > 0
        assert math.isfinite(report[name]["loss"])
        assert report[name]["loss"] < LOSS_BOUND


@pytest.mark.parametrize("name", MODELS)
def test_a_directory_loads_and_generates(trained: tuple[Path, dict], name: str) -> None:
    directory, _ = trained
    model = AutoModelForCausalLM.from_pretrained(directory / name)
    tokenizer = AutoTokenizer.from_pretrained(directory / name)
    assert model.dtype == torch.bfloat16
    ids = tokenizer("def add(a, b):\n    return", return_tensors="pt").input_ids
    output = model.generate(ids, min_new_tokens=4, max_new_tokens=4, do_sample=False)
    assert output.shape == (1, ids.shape[1] + 4)


@pytest.mark.parametrize("name", MODELS)
def test_the_config_is_the_shipped_one(trained: tuple[Path, dict], name: str) -> None:
    directory, _ = trained
    for file in ("config.json", "generation_config.json"):
        got, shipped = (
            json.loads((root / name / file).read_text(encoding="utf-8"))
            for root in (directory, EXAMPLES / "models")
        )
        # transformers writes its own version into both files; any that loads them will do
        assert got | {"transformers_version": ""} == shipped | {"transformers_version": ""}


def test_the_pair_shares_one_tokenizer(trained: tuple[Path, dict]) -> None:
    directory, _ = trained
    target, draft = ((directory / name / "tokenizer.json").read_bytes() for name in MODELS)
    assert target == draft
    tokenizer = AutoTokenizer.from_pretrained(directory / "target")
    assert len(tokenizer) == 4096
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<s>", "</s>"]) == [0, 1, 2]
    text = "x = [1,  2]\n\tprint('naïve')  # end\n"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_calculator_marks_are_removed(tmp_path: Path) -> None:
    path = write_gsm8k(tmp_path / "train.jsonl", items=3)
    documents = runpy.run_path(str(SCRIPT))["gsm8k_documents"](path)
    assert len(documents) == 3
    assert documents[2] == (
        "Question: Tom has 2 boxes with 4 apples each. How many apples does he have?\n"
        "Answer: He has 2*4=8 apples.\n#### 8"
    )


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    done = run_script("--steps", "1", "1", "--max-megabytes", "0.01", "--output", tmp_path / "pair")
    assert done.returncode != 0
    assert "ValueError: too little text" in done.stderr
    assert "no --gsm8k: training on Python source alone" in done.stderr
    assert not (tmp_path / "pair").exists()
