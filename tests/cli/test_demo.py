"""`vllm-recycle demo`: a real run, outputs that differ, missing and refused input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_recycle.cli import demo, main
from vllm_recycle.cli.bench.arguments import read_prompts

ROOT = Path(__file__).parents[2]
GSM8K = ROOT / "examples/prompts/gsm8k.jsonl"
HUMANEVAL = ROOT / "examples/prompts/humaneval.jsonl"


def reply(*outputs):
    return {
        "wall_s": 1.0,
        "requests": len(outputs),
        "tokens": sum(map(len, outputs)),
        "steps": 2,
        "accepted_tokens": 1,
        "others_cpu_share": 0.0,
        "outputs": list(outputs),
    }


def test_both_runs_are_shown_and_compared(tmp_path):
    command = [sys.executable, "-m", "vllm_recycle.cli", "demo"]
    arguments = ["--num-prompts=2", "--max-tokens=16"]
    run = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == (
        f"{ROOT}/examples/models/target, 2 prompts, 16 new tokens at most; greedy, one prompt at a "
        "time,"
    )
    assert [line[:9] for line in lines if line.startswith("prompt ")] == ["prompt 1:", "prompt 2:"]
    assert lines.count("  both:") == 2
    head, plain, recycling = (
        line.split() for line in lines if line.startswith((" " * 10, "plain ", "token "))
    )
    assert head == ["tokens/s", "speed-up", "accepted", "steps", "outputs", "identical"]
    # The prompt's step gives the first token of each output.
    assert plain[:2] + plain[3:] == ["plain", "decoding", "1.00", "1.00", str(2 * 15)]
    assert float(recycling[4]) >= 1
    assert int(recycling[5]) <= 2 * 15
    assert recycling[6] == "yes"


def test_outputs_that_differ_are_an_error(monkeypatch, capsys):
    replies = {demo.PLAIN: reply([5, 6, 7], [8]), demo.RECYCLING: reply([5, 6, 7], [9])}
    monkeypatch.setattr(demo, "generate", lambda plan: replies)
    assert main(["demo", "--num-prompts=2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "outputs differ in prompts 2"
    assert [line for line in lines if line.startswith("  ") and line.endswith(":")] == [
        "  both:",
        "  plain decoding:",
        "  token recycling:",
    ]
    assert any(line.startswith("token recycling ") and line.endswith(" NO") for line in lines)


def test_the_prompts_of_both_files_alternate(monkeypatch):
    plans = []
    replies = dict.fromkeys(demo.TITLES, reply(*[[5]] * demo.NUM_PROMPTS))
    monkeypatch.setattr(demo, "generate", lambda plan: plans.append(plan) or replies)
    assert main(["demo"]) == 0
    gsm8k, humaneval = read_prompts(GSM8K), read_prompts(HUMANEVAL)
    assert plans[0].prompts[:3] == (gsm8k[0], humaneval[0], gsm8k[1])
    assert len(plans[0].prompts) == demo.NUM_PROMPTS
    assert plans[0].dtype == "float32"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ([], "--model"),
        ([f"--prompts={GSM8K}"], "--model"),
        ([f"--model={ROOT}/examples/models/target"], "--prompts"),
    ],
)
def test_an_installed_package_names_what_it_needs(arguments, option, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "EXAMPLES", tmp_path / "examples")
    assert main(["demo", *arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"vllm-recycle demo: error: no {tmp_path}/examples/")
    assert line.endswith(f"name your own with {option}\n")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=/nowhere"], "--model /nowhere: no config.json there"),
        (["--prompts=/nowhere.jsonl"], "--prompts /nowhere.jsonl cannot be read"),
        (["--num-prompts=81"], "--num-prompts is 81, but there are 80"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, message, capsys):
    assert main(["demo", *arguments]) == 2
    line = capsys.readouterr().err
    assert message in line
    assert line.count("\n") == 1
