"""`vllm-recycle demo`: a real run, outputs that differ, missing and refused input."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import MODEL, ROOT, refused
from tests.cli.commands import PROMPTS as GSM8K
from vllm_recycle.cli import demo, main
from vllm_recycle.cli.bench.prompts import read_prompts

HUMANEVAL = ROOT / "examples/prompts/humaneval.jsonl"
SPEC_BENCH = ROOT / "examples/prompts/spec_bench.jsonl"
EMBEDDED = f"--model={MODEL}"


def replies(*outputs):
    counts = {"wall_s": 1.0, "steps": 2, "accepted_tokens": 1, "others_cpu_share": 0.0}
    return [counts | {"tokens": len(output), "outputs": [output]} for output in outputs]


@pytest.mark.slow
def test_answers_are_streamed_in_colour_and_compared(tmp_path):
    arguments = [EMBEDDED, "--num-prompts=2", "--max-tokens=16"]
    command = [sys.executable, "-m", "vllm_recycle", "demo", *arguments]
    terminal, inside = pty.openpty()
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=inside, stderr=subprocess.PIPE, text=True
    ) as run:
        os.close(inside)
        shown = read_all(terminal)
        errors = run.stderr.read()
    assert run.returncode == 0, errors
    # What one step gave together has a colour; such steps are what the method is for.
    assert re.search(r"\x1b\[3[2356]m[^\x1b]+\x1b\[0m", shown)
    lines = re.sub(r"\x1b\[\d+m", "", shown).splitlines()
    assert lines[0] == (f"{MODEL}, 2 prompts, 16 new tokens at most; greedy, one prompt at a time,")
    assert [line[:5] for line in lines if line.startswith("[")] == ["[1/2]", "[2/2]"]
    plain_steps = [line.split()[2] for line in lines if line.startswith("  plain decoding ")]
    assert plain_steps == ["15", "15"]  # the prompt's step gives the first token
    head, plain, recycling = (
        line.split() for line in lines if line.startswith((" " * 10, "plain ", "token "))
    )
    assert head == ["tokens/s", "speed-up", "accepted", "steps", "outputs", "identical"]
    assert plain[:2] + plain[3:] == ["plain", "decoding", "1.00", "1.00", str(2 * 15)]
    assert float(recycling[4]) > 1
    assert int(recycling[5]) < 2 * 15
    assert recycling[6] == "yes"


def read_all(terminal: int) -> str:
    """What a program writes to its terminal until it ends."""
    read = b""
    while True:
        try:
            part = os.read(terminal, 2**16)
        except OSError:  # how a terminal's end is told on Linux
            part = b""
        if not part:
            os.close(terminal)
            return read.decode()
        read += part


def test_no_terminal_has_no_colours(capsys):
    events = [{"event": "text", "text": text, "tokens": 2, "prompt": 0} for text in ("a b", " c")]
    assert demo.show([*events, {"tokens": 4}]) == {"tokens": 4}
    assert capsys.readouterr().out == "a b c\n\n"


def test_outputs_that_differ_are_an_error(monkeypatch, capsys):
    given = {demo.PLAIN: replies([5, 6, 7], [8]), demo.RECYCLING: replies([5, 6, 7], [9])}
    monkeypatch.setattr(demo, "generate", lambda plan: given)
    assert main(["demo", EMBEDDED, "--num-prompts=2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "outputs differ in prompts 2"
    assert any(line.startswith("token recycling ") and line.endswith(" NO") for line in lines)


def make_plan(*arguments: str) -> demo.Plan:
    """The plan of a run that is not made."""
    plans = []
    given = dict.fromkeys(demo.TITLES, replies([5]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "generate", lambda plan: plans.append(plan) or given)
        assert main(["demo", *arguments]) == 0
    return plans[0]


def test_without_the_chat_model_the_embedded_one_runs_on_what_it_knows(monkeypatch, capsys):
    monkeypatch.setattr(demo, "CHAT_MODEL", Path("models/missing"))
    plan = make_plan()
    assert "models/missing (`make model` fetches it): the small embedded" in capsys.readouterr().out
    assert (plan.model, plan.chat, plan.dtype) == (str(MODEL), False, "float32")
    gsm8k, humaneval = read_prompts(GSM8K), read_prompts(HUMANEVAL)
    assert plan.prompts[:3] == (gsm8k[0], humaneval[0], gsm8k[1])
    assert len(plan.prompts) == demo.NUM_PROMPTS


def test_the_chat_model_is_asked_a_question_of_each_category(tmp_path, monkeypatch):
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    monkeypatch.setattr(demo, "CHAT_MODEL", tmp_path)
    plan = make_plan()
    assert (plan.model, plan.chat) == (str(tmp_path), True)
    assert len({prompt.category for prompt in plan.prompts}) == demo.NUM_PROMPTS
    assert all(len(prompt.turns) == 1 for prompt in plan.prompts)
    assert set(plan.prompts) <= set(read_prompts(SPEC_BENCH))


def test_an_installed_package_needs_a_model_and_nothing_else(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "EXAMPLES", tmp_path / "examples")
    line = refused(["demo", f"--prompts={GSM8K}"], capsys)
    assert line.startswith("vllm-recycle demo: error: no --model: the embedded models come with")
    assert str(tmp_path) not in line
    plan = make_plan(EMBEDDED)
    assert tuple(prompt.turns[0] for prompt in plan.prompts) == demo.PROMPTS_OF_PACKAGE
    assert len(plan.prompts) == demo.NUM_PROMPTS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=/nowhere"], "--model: no such folder /nowhere, expected a model directory"),
        ([f"--model={ROOT}"], f"--model: no config.json in {ROOT}, expected a model directory"),
        ([EMBEDDED, "--prompts=/nowhere.jsonl"], "--prompts /nowhere.jsonl cannot be read"),
        ([EMBEDDED, "--num-prompts=81"], "--num-prompts is 81, but there are 80"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, message, capsys):
    assert message in refused(["demo", *arguments], capsys)
