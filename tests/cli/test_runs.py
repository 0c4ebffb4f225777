"""Real runs: of every command of a wheel, outside of the checkout, and of a benchmark's worker."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import vllm
from vllm import SamplingParams

import vllm_recycle
from tests.cli.commands import DRAFT_MODEL, EMBEDDED, MODEL, ROOT, bench
from tests.integration.engines import engine
from vllm_recycle.cli.bench import driver, methods
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.bench.prompts import Prompt
from vllm_recycle.kernels.cpu import build

PACKAGE = ROOT / "vllm_recycle"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
PROMPTS = (
    Prompt(("Tom has 3 apples and buys 4. How many has he?", "And if he eats two?"), "sums"),
    Prompt(("def add(a, b):",), "code"),
    Prompt(("Anna runs 5 miles a day. How many in a week?",), "sums"),
    Prompt(("class Stack:",), "code"),
)
MAX_TOKENS = 12
EAGER = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
# What a call ends with, and a part of what it says.
COMMANDS = {
    "--version": (0, f"vllm-recycle {vllm_recycle.__version__}, vllm {vllm.__version__}\n"),
    f"check {MODEL} --dtype=float32": (0, "target with token_recycling"),
    "check --build": (0, "/vllm_recycle/kernels/cpu/shipped/"),
    "tree show paper-80": (0, "paper-80"),
    "demo": (2, "demo: error: no --model: the embedded models come with the repository"),
}
CALLS = """import os, sys; from vllm_recycle.cli import main
os.dup2(1, 2)
for line in sys.argv[1:]:
    try:
        status = main(line.split())
    except SystemExit as end:
        status = end.code
    print(f"ended with {status}", flush=True)"""


def test_the_wheel_has_every_file_that_is_read():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["vllm_recycle"]
    packed = {file for pattern in patterns for file in PACKAGE.glob(pattern)}
    there = {file for file in PACKAGE.rglob("*.*") if file.suffix not in (".py", ".md", ".pyc")}
    assert there == packed
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder that pip has installed this checkout into, with the kernels for this CPU."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    copied = shutil.copytree(PACKAGE, source / PACKAGE.name)
    flags = set(build._cpu_flags().split())
    variants = [item for item in build.VARIANTS.items() if flags.issuperset(item[1][0])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FOLDER", copied / "kernels/cpu")
        patch.setattr(build, "VARIANTS", dict(variants[:1]))
        build.main()
    pip = ["pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    pip += ["--no-build-isolation", "--target", str(target), str(source)]
    subprocess.run([sys.executable, "-m", *pip], check=True)
    return target


@pytest.fixture
def outside(installed, tmp_path, monkeypatch) -> Path:
    """A folder that is no checkout, where Python has the installed package."""
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_kernels_of_the_wheel_have_the_bits_of_vllms(installed, outside):
    tests = ROOT / "tests" / "kernels" / "cpu" / "test_bits.py"
    code = (
        "import sys, pytest; from vllm_recycle.kernels.cpu import build;"
        f"assert build.find_or_build().path.is_relative_to({str(installed)!r});"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {str(tests)!r}]))"
    )
    done = run("-c", code)
    assert (done.returncode, " passed" in done.stdout) == (0, True), done.stdout[-2000:]


@pytest.mark.slow
def test_commands_of_an_installed_package(installed, outside):
    output = run("-c", CALLS, *COMMANDS).stdout
    said, statuses = (re.split(r"ended with (\d+)\n", output)[start::2] for start in (0, 1))
    assert [*map(int, statuses)] == [status for status, _ in COMMANDS.values()], output
    for text, (_, expected) in zip(said, COMMANDS.values(), strict=False):
        assert expected in text
    assert str(installed / "examples") not in output


@pytest.mark.nightly
def test_answers_are_streamed_in_colour_and_compared(outside):
    read = []

    def keep(terminal: int) -> bytes:
        read.append(os.read(terminal, 2**16))
        return read[-1]

    demo = ["-m", "vllm_recycle", "demo", EMBEDDED, "--num-prompts=2", "--max-tokens=16"]
    status = pty.spawn([sys.executable, *demo], keep)
    shown = b"".join(read).decode()
    assert status == 0, shown
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


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    """The embedded target, whose tokenizer is given a chat template."""
    folder = tmp_path_factory.mktemp("chat-model")
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def answers(chat_model) -> tuple[list[list[int]], list[str]]:
    """Token ids and text of each conversation's answers, by vLLM's own `LLM.chat`."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    token_ids, texts = [], []
    with engine(model=str(chat_model)) as llm:
        for prompt in PROMPTS:
            messages, outputs = [], []
            for turn in prompt.turns:
                messages.append({"role": "user", "content": turn})
                outputs += llm.chat(messages, params, use_tqdm=False)[0].outputs
                messages.append({"role": "assistant", "content": outputs[-1].text})
            token_ids.append([token for output in outputs for token in output.token_ids])
            texts.append("".join(output.text for output in outputs))
    return token_ids, texts


@pytest.mark.nightly
def test_answers_go_into_the_next_turn_and_follow_schemas(chat_model, answers):
    of_bool = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema = {**of_bool, "additionalProperties": False}
    short = {"backend": "xgrammar", "disable_any_whitespace": True}
    settings = {"chat": True, "max_tokens": MAX_TOKENS, "dtype": "float32"}
    settings["engine_args"] = {**EAGER, "structured_outputs_config": short}
    prompts = (*PROMPTS, replace(PROMPTS[1], json_schema=schema))
    plan = Plan(str(chat_model), Path("prompts.jsonl"), prompts, {"none": None}, **settings)
    with driver.children(plan) as running:
        child = running["none"]
        driver.load(plan, child, None)
        reply = child.ask("run", **driver.pass_arguments(plan, 1, 0))
        together = child.ask("run", **driver.pass_arguments(plan, 4, 0))
        warm = driver.pass_arguments(replace(plan, temperature=1.0), 1, 0)
        sampled = [child.ask("run", **warm)["outputs"] for _ in range(2)]
        *events, streamed = child.follow("run", stream=True, **driver.pass_arguments(plan, 1, 0))
    *outputs, follows = reply["outputs"]
    expected, texts = answers
    assert outputs == expected
    assert reply["outputs"] == together["outputs"] == streamed["outputs"]
    assert sampled[0] == sampled[1] != reply["outputs"]
    assert [one["requests"] for one in reply["prompts"]] == [2, 1, 1, 1, 1]
    assert [one["tokens"] for one in reply["prompts"]] == [*map(len, expected), len(follows)]
    assert 0.9 < sum(one["seconds"] for one in reply["prompts"]) / reply["wall_s"] <= 1
    *told, follows = (
        "".join(event["text"] for event in events if event["prompt"] == index)
        for index in range(len(plan.prompts))
    )
    assert told == texts
    assert json.loads(follows).keys() == {"ok"}
    assert sum(event["tokens"] for event in events) == reply["tokens"]


@pytest.mark.nightly
def test_methods_are_measured_side_by_side(chat_model, answers, outside):
    lines = [
        json.dumps({"category": prompt.category, "turns": prompt.turns, "hint": text})
        for prompt, text in zip(PROMPTS, answers[1], strict=True)
    ]
    Path("prompts.jsonl").write_text("\n".join(lines))
    recycling = {"method": "token_recycling", "row_cost": 0}  # whatever a row costs on this machine
    ours = {"token_recycling": recycling, "hints": recycling}
    ours["ouroboros"] = {"method": "ouroboros", "model": str(DRAFT_MODEL), "row_cost": 0}
    names = ["none", "draft_model", *ours]
    arguments = bench(model=chat_model, prompts=Path("prompts.jsonl"))
    arguments += ["--chat", "--by-category", "--ignore-eos", "--dtype=float32"]
    arguments += [f"--methods={','.join(names)}", f"--draft-model={DRAFT_MODEL}"]
    for name, config in ours.items():
        arguments.append(f"--speculative-config={name}={json.dumps(config)}")
    arguments += [f"--max-tokens={MAX_TOKENS}", "--repeats=2", "--concurrency=1,2"]
    arguments += [f"--engine-args={json.dumps(EAGER)}", "--json=result.json"]
    done = run("-m", "vllm_recycle", *arguments)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    report = json.loads(last)
    assert report == json.loads(Path("result.json").read_text())

    conditions, rows = report["conditions"], report["results"]
    assert conditions["versions"].keys() >= {"vllm", "torch", "vllm_recycle"}
    assert conditions["methods_without_plugin"] == ["none", "draft_model"]
    assert conditions["methods"]["ouroboros"] == ours["ouroboros"]
    assert conditions["chat"] is True
    found = [(row["method"], row["concurrency"]) for row in rows]
    assert found == [(name, level) for level in (1, 2) for name in names]
    for row in rows:
        assert row.keys() >= {"tokens_per_s", "mean_accepted_tokens_first_pass", "step_ms"}
        assert row["outputs_equal"] is True
        assert (row["requests"], row["tokens"]) == (5, 5 * MAX_TOKENS)
        assert list(row["categories"]) == ["sums", "code"]
        figures = row["categories"].values()
        assert [one["runs"] for one in figures] == [4, 4]  # two prompts in two repeats
        assert sum(one["tokens"] for one in figures) == 2 * row["tokens"]
        # The categories' times are all of the passes' but what is between the steps.
        seconds = sum(one["tokens"] / one["tokens_per_s"] for one in figures)
        assert 0.8 * sum(row["wall_s"]) < seconds < sum(row["wall_s"])
        if row["method"] == "none":
            gains = [row, *figures]
            assert {(one["speedup"], one["mean_accepted_tokens"]) for one in gains} == {(1, 1)}
            assert row["rows_per_step"] == 1
            assert row["steps"] == 5 * (MAX_TOKENS - 1)  # a prompt's step gives the first token
        else:
            assert row["rows_per_step"] > row["mean_accepted_tokens"] > 1
    none, draft_model, recycling, hints, ouroboros = rows[: len(names)]
    assert none["draft_forwards_per_round"] is None
    assert draft_model["draft_forwards_per_round"] == methods.DEFAULT_DRAFT_TOKENS
    assert 1 <= ouroboros["draft_forwards_per_round"] <= 12
    # Of the two alone `hints` is told the hints; later passes know the answers without.
    assert hints["first_pass"]["steps"] < recycling["first_pass"]["steps"]
    assert "draft forwards" in next(line for line in table if "tokens/s" in line)
    for level in (1, 2):
        start = table.index(f"speedup (accepted) with {level} in flight")
        heads, *lines = (line.split() for line in table[start + 1 : start + 5])
        assert heads == ["runs", *names]
        assert [line[:2] for line in lines] == [["sums", "4"], ["code", "4"], ["all", "8"]]
