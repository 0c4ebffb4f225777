"""`vllm-recycle bench`: arguments and prompt files that are refused, in one line."""

from __future__ import annotations

import pytest

from tests.cli.commands import DRAFT_MODEL, MODEL, bench, refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods=none,medusa"], "unknown method 'medusa', expected of none, ngram"),
        (["--methods=none,none"], "twice"),
        (["--methods=none", "--concurrency=1,zero"], "got '1,zero', expected"),
        (["--methods=none", "--repeats=-1"], "got '-1', expected an integer of at least 1"),
        (["--methods=none", "--temperature=-1"], "got '-1', expected a number from 0 to 2"),
        (["--methods=none", "--num-prompts=9999"], "--num-prompts is 9999, but"),
        (["--methods=none", "--dtype=float8"], "float8"),
        (["--methods=none", "--engine-args=[]"], "--engine-args: expected a JSON object, got []"),
        (["--methods=none", "--json=/nowhere/x.json"], "no directory /nowhere"),
        (["--methods=none", "--speculative-config=x={}"], "x is not among --methods none"),
        (["--methods=x", "--speculative-config=x={"], "--speculative-config x: not JSON"),
        (["--methods=none", "--speculative-config=none={}"], "expected NAME=JSON"),
        (["--methods=none,draft_model"], "draft_model needs --draft-model DIR"),
        (["--draft-tokens=4"], "--draft-tokens needs --draft-model"),
        (["--draft-model=/nowhere"], "--draft-model: no such folder /nowhere, expected a model"),
        (["--model=a/b/c"], "--model: no such folder a/b/c, expected a model directory or ORG"),
        ([f"--model={DRAFT_MODEL.parent}"], f"--model: no config.json in {DRAFT_MODEL.parent}"),
        (["--methods=none", f"--draft-model={DRAFT_MODEL}"], "of which none is run"),
        (["--methods=none", "--fresh-prompts", "--num-prompts=3"], "got 3 prompts, expected at"),
        (["--methods=none,hints"], "the method hints: "),
        (["--methods=none", "--by-category"], "gsm8k.jsonl has prompts without a category"),
        (["--methods=none", "--chat"], "models/target has no chat template"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, message, capsys):
    assert refused(bench(*arguments), capsys).count(message) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('\n{"text": "a"}\n', "line 2: neither `prompt` nor `turns`"),
        ('{"turns": []}\n', "line 1: `prompt` must be a string"),
        ('{"turns": ["a", 2]}\n', "line 1: `prompt` must be a string, `turns` a list of strings"),
        ('{"prompt": "a", "category": 3}\n', "line 1: `category` must be a string, got 3"),
        ('{"prompt": "a", "hint": 3}\n', "line 1: `hint` must be a string, got 3"),
        ('{"prompt": "a", "json_schema": [1]}\n', "line 1: `json_schema` must be an object, got"),
        ("\n", "has no prompts"),
        (None, "cannot be read"),
    ],
)
def test_bad_prompt_files_are_refused_in_one_line(lines, message, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    if lines is not None:
        path.write_text(lines)
    assert message in refused(bench("--methods=none", prompts=path), capsys)


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"vocab_size": 4095}')
    line = refused(bench(f"--draft-model={tmp_path}"), capsys)
    assert f"{tmp_path}: a vocabulary of 4095, expected the 4096 of --model {MODEL}" in line


def test_a_missing_optional_package_is_named_with_its_command(monkeypatch, capsys):
    monkeypatch.setattr("vllm_recycle.cli.bench.methods.find_spec", lambda name: None)
    assert "pip install arctic-inference" in refused(bench("--methods=suffix"), capsys)
