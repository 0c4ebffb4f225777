"""What the commands refuse: in one line on stderr, with status 2."""

from __future__ import annotations

import pytest

from tests.cli.commands import DRAFT_MODEL, EMBEDDED, MODEL, ROOT, bench
from vllm_recycle.cli import main


@pytest.fixture
def refused(capsys):
    """The line of a call."""

    def said(arguments: list[str]) -> str:
        try:
            status = main(arguments)
        except SystemExit as error:
            status = error.code
        line = capsys.readouterr().err
        assert (status, line.count("\n")) == (2, 1), line
        names = (arguments[0], " ".join(arguments[:2]))
        assert line.startswith(tuple(f"vllm-recycle {name}: error: " for name in names))
        return line

    return said


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
        (["--methods=none", "--json=/nowhere/x.json"], "--json is '/nowhere/x.json', expected"),
        (["--methods=none", "--json="], "--json is '.', expected a file, not a directory"),
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
def test_arguments_of_a_benchmark(arguments, message, refused):
    assert refused(bench(*arguments)).count(message) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("demo --model=/nowhere", "--model: no such folder /nowhere, expected a model directory"),
        (f"demo --model={ROOT}", f"--model: no config.json in {ROOT}, expected a model directory"),
        (f"demo {EMBEDDED} --prompts=/nowhere.jsonl", "--prompts /nowhere.jsonl cannot be read"),
        (f"demo {EMBEDDED} --num-prompts=81", "--num-prompts is 81, but there are 80"),
        (
            "tree show missing.json",
            "expected one of ['chain', 'default', 'paper-80'] or the path of a JSON file",
        ),
        ("tree show paper-80 --max-nodes=81", "got 81, expected at most the 80 nodes"),
        ("tree show paper-80 --max-nodes=0", "got '0', expected an integer of at least 1"),
        ("tree show", "the following arguments are required"),
        ("check", "error: expected a MODEL, or --build\n"),
        (f"check {MODEL} --no-such-flag", "error: unrecognized arguments: --no-such-flag\n"),
    ],
)
def test_arguments_of_other_commands(arguments, message, refused):
    assert message in refused(arguments.split())


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
def test_files_of_prompts(lines, message, refused, tmp_path):
    path = tmp_path / "prompts.jsonl"
    if lines is not None:
        path.write_text(lines)
    assert message in refused(bench("--methods=none", prompts=path))


def test_a_draft_model_of_another_vocabulary(refused, tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 4095}')
    line = refused(bench(f"--draft-model={tmp_path}"))
    assert f"{tmp_path}: a vocabulary of 4095, expected the 4096 of --model {MODEL}" in line


def test_a_missing_optional_package_is_named_with_its_command(refused, monkeypatch):
    monkeypatch.setattr("vllm_recycle.cli.bench.methods.find_spec", lambda name: None)
    assert "pip install arctic-inference" in refused(bench("--methods=suffix"))
