"""`vllm-recycle bench`: real runs, what is measured and compared, children that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.cli import fake_worker
from tests.cli.commands import DRAFT_MODEL, FAKE_WORKER, PROMPTS, ROOT, bench
from vllm_recycle.cli import RunError, main
from vllm_recycle.cli.bench import driver, methods
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.bench.prompts import Prompt
from vllm_recycle.cli.bench.report import make_report, origin

EAGER = '{"enforce_eager": true, "kv_cache_memory_bytes": 67108864}'
OUROBOROS_OF_6 = f'ouroboros={{"method": "ouroboros", "model": "{DRAFT_MODEL}", "gamma": 6}}'
RESULT_KEYS = {
    "method",
    "concurrency",
    "tokens_per_s",
    "speedup",
    "mean_accepted_tokens",
    "mean_accepted_tokens_first_pass",
    "steps",
    "step_ms",
    "outputs_equal",
}


def test_methods_are_measured_side_by_side(tmp_path):
    arguments = bench("--num-prompts=2", "--max-tokens=8", "--repeats=1", "--dtype=float32")
    files = ["--json", str(tmp_path / "result.json")]
    command = [sys.executable, "-m", "vllm_recycle", *arguments, "--methods=none,ngram", *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "result.json").read_text())

    assert report["conditions"]["versions"].keys() >= {"vllm", "torch", "vllm_recycle"}
    assert report["conditions"]["methods_without_plugin"] == ["none", "ngram"]
    none, ngram = report["results"]
    for row, method in ((none, "none"), (ngram, "ngram")):
        assert row.keys() >= RESULT_KEYS
        assert (row["method"], row["concurrency"]) == (method, 1)
        assert row["outputs_equal"] is True
        assert row["tokens"] == 2 * 8
    assert none["speedup"] == none["mean_accepted_tokens"] == 1
    assert none["steps"] == 2 * 7  # the prompt's step gives the first token
    assert ngram["rows_per_step"] > none["rows_per_step"] == 1


@pytest.mark.slow
def test_methods_with_a_draft_model_are_measured_side_by_side(tmp_path):
    arguments = bench("--num-prompts=2", "--max-tokens=16", "--repeats=1", "--dtype=float32")
    arguments += ["--draft-model", str(DRAFT_MODEL), "--methods=none,draft_model,ouroboros"]
    arguments += ["--engine-args", EAGER, "--json", str(tmp_path / "result.json")]
    whole = {"method": "ouroboros", "model": str(DRAFT_MODEL), "row_cost": 0}
    arguments += ["--speculative-config", f"ouroboros={json.dumps(whole)}"]
    command = [sys.executable, "-m", "vllm_recycle", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["conditions"]["methods_without_plugin"] == ["none", "draft_model"]
    none, draft_model, ouroboros = report["results"]
    assert none["draft_forwards_per_round"] is None
    assert draft_model["draft_forwards_per_round"] == methods.DEFAULT_DRAFT_TOKENS
    assert 1 <= ouroboros["draft_forwards_per_round"] <= 12
    for row in report["results"]:
        assert row["outputs_equal"] is True
    assert draft_model["mean_accepted_tokens"] > 1
    assert ouroboros["mean_accepted_tokens"] > 1
    head = next(line for line in run.stdout.splitlines() if "tokens/s" in line)
    assert "draft forwards" in head


def test_the_speed_up_is_the_median_of_ratios_of_passes_that_ran_together():
    def one(seconds: float) -> driver.Reply:
        request = {"start": 0, "stop": 1}
        return fake_worker.run({}, request) | {"wall_s": seconds}

    # The machine was slow in the second pass of both.
    passes = {("none", 1): [one(2), one(8), one(2)], ("ngram", 1): [one(1), one(5), one(3)]}
    engine = {"versions": {}, "dtype": "float32", "device": "cpu"}
    names = ("none", "ngram")
    firsts = {name: one(1) for name in names}
    found = driver.Measurement(dict.fromkeys(names, engine), firsts, passes)
    plan = Plan("m", PROMPTS, (Prompt(("a",)),), dict.fromkeys(names), repeats=3)
    _, ngram = make_report(plan, found)["results"]
    assert ngram["speedup"] == pytest.approx(8 / 5)
    assert ngram["speedups"] == pytest.approx([2 / 1, 8 / 5, 2 / 3])


def test_a_report_has_the_variables_of_vllm_that_are_set(monkeypatch, tmp_path):
    for name in [*os.environ]:
        if name.startswith("VLLM_") or name in ("OMP_NUM_THREADS", "LD_PRELOAD"):
            monkeypatch.delenv(name)
    assert origin()["environment"] == {}
    shown = {
        "OMP_NUM_THREADS": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_RECYCLE": '{"method": "token_recycling"}',
    }
    hidden = {
        "LD_PRELOAD": str(tmp_path / "libtcmalloc.so"),
        "OTHER": "0",
        "VLLM_API_KEY": "secret",
        "VLLM_CACHE_ROOT": "~/cache",
        "VLLM_HOST_IP": "192.0.2.1",
    }
    for name, value in (shown | hidden).items():
        monkeypatch.setenv(name, value)
    assert origin()["environment"] == shown


def test_every_number_of_draft_tokens_is_a_method(monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "WORKER", FAKE_WORKER)
    monkeypatch.setattr(methods, "find_spec", lambda name: None)  # no suffix
    file = tmp_path / "result.json"
    arguments = bench("--draft-model", str(DRAFT_MODEL), "--draft-tokens=4,8", "--json", str(file))
    assert main([*arguments, "--num-prompts=2", "--speculative-config", OUROBOROS_OF_6]) == 0
    chosen = json.loads(file.read_text())["conditions"]["methods"]
    names = ["none", "ngram", "draft_model-4", "draft_model-8", "token_recycling", "ouroboros"]
    assert list(chosen) == names
    assert chosen["draft_model-8"]["num_speculative_tokens"] == 8
    assert chosen["ouroboros"]["gamma"] == 6


def test_passes_share_the_prompts_out_when_they_are_to_be_fresh():
    plan = Plan("m", PROMPTS, tuple("abcdefghij"), {}, repeats=2, concurrency=(1, 2))
    assert {plan.prompts_of(number) for number in range(5)} == {(0, 10)}
    fresh = Plan("m", PROMPTS, plan.prompts, {}, repeats=2, concurrency=(1, 2), fresh_prompts=True)
    assert [fresh.prompts_of(number) for number in range(5)] == [
        (0, 2),
        (2, 4),
        (4, 6),
        (6, 8),
        (8, 10),
    ]


def test_no_more_engines_are_alive_than_asked_for():
    plan = Plan("m", PROMPTS, ("a",), dict.fromkeys("abcde"), max_engines=2)
    assert [list(part.methods) for part in driver.parts(plan)] == [["a", "b"], ["c", "d"], ["e"]]


def test_only_the_plugins_methods_load_the_plugin(monkeypatch):
    ours = SimpleNamespace(name="ours", value="vllm_recycle.integration.plugin:register")
    other = SimpleNamespace(name="other", value="elsewhere:register")
    found = {"vllm.general_plugins": [ours, other]}
    monkeypatch.setattr(driver, "entry_points", lambda *, group: found.get(group, []))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert driver.child_environment(None)["VLLM_PLUGINS"] == "other"
    assert "VLLM_PLUGINS" not in driver.child_environment({"method": "token_recycling"})
    monkeypatch.setenv("VLLM_PLUGINS", "ours")
    assert driver.child_environment({"method": "ngram"})["VLLM_PLUGINS"] == ""
    assert driver.child_environment({"method": "token_recycling"})["VLLM_PLUGINS"] == "ours"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; input(); sys.exit('the reason')", r"died \(exit status 1\)"),
        ("import sys; sys.stderr.write('the reason'); sys.stdout.write('{')", "died"),
        (
            "import subprocess, sys, os\n"
            "subprocess.Popen(['sleep', '60']); sys.stderr.write('the reason'); os._exit(3)",
            r"died \(exit status 3\)",  # the grandchild still holds the pipe
        ),
        (
            "import sys; input(); sys.stderr.write('the reason'); sys.stderr.flush()\n"
            """print('{"error": "no tree"}', flush=True); sys.stdin.read()""",
            "failed: no tree",
        ),
    ],
)
def test_a_child_that_fails_ends_the_run_with_its_last_lines(program, message, monkeypatch, capsys):
    monkeypatch.setattr(driver, "WORKER", ("-c", program))
    plan = SimpleNamespace(methods={"none": None})
    with pytest.raises(RunError, match=message), driver.children(plan) as children:
        children["none"].ask("load")
    assert "the reason" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_child_outlives_an_interrupted_run(number, monkeypatch):
    monkeypatch.setattr(driver, "WORKER", ("-c", "import time; time.sleep(60)"))
    plan = SimpleNamespace(methods={"none": None, "ngram": {"method": "ngram"}})
    processes = []

    def interrupted():
        with driver.children(plan) as children:
            processes.extend(child._process for child in children.values())
            signal.raise_signal(number)

    # A shell's background jobs start with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            interrupted()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [process.returncode for process in processes] == [-9, -9]
