"""`vllm-recycle bench`: what is measured and compared, where a run is, children that fail."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.cli.commands import DRAFT_MODEL, PROMPTS, bench
from vllm_recycle.cli import RunError, main
from vllm_recycle.cli.bench import driver, methods, progress
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.bench.prompts import Prompt
from vllm_recycle.cli.bench.report import make_report, origin

CONNECT = """import os, subprocess, sys; from multiprocessing.connection import Connection
driver = Connection(int(sys.argv[1]))
"""


def test_the_speed_up_is_the_median_of_ratios_of_passes_that_ran_together():
    counts = ("requests", "tokens", "steps", "engine_steps", "draft_tokens", "accepted_tokens")
    reply = dict.fromkeys((*counts, "step_ms", "others_cpu_share"), 1) | {"outputs": [[1]]}
    # The machine was slow in the second pass of both.
    seconds = {("none", 1): (2, 8, 2), ("ngram", 1): (1, 5, 3)}
    passes = {key: [reply | {"wall_s": wall} for wall in walls] for key, walls in seconds.items()}
    engines = {"none": {"versions": {}, "dtype": "float32", "device": "cpu"}}
    firsts = dict.fromkeys(("none", "ngram"), reply | {"wall_s": 1})
    plan = Plan("m", PROMPTS, (Prompt(("a",)),), dict.fromkeys(firsts), repeats=3)
    _, ngram = make_report(plan, driver.Measurement(engines, firsts, passes))["results"]
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


def test_every_number_of_draft_tokens_is_a_method(monkeypatch):
    plans = []
    monkeypatch.setattr(driver, "measure", lambda plan: sys.exit(plans.append(plan)))
    monkeypatch.setattr(methods, "find_spec", lambda name: None)  # no suffix
    given = {"method": "ouroboros", "model": str(DRAFT_MODEL), "gamma": 6}
    arguments = bench(f"--draft-model={DRAFT_MODEL}", "--draft-tokens=4,8")
    with pytest.raises(SystemExit):
        main([*arguments, "--speculative-config", f"ouroboros={json.dumps(given)}"])
    chosen = plans[0].methods
    names = ["none", "ngram", "draft_model-4", "draft_model-8", "token_recycling", "ouroboros"]
    assert list(chosen) == names
    assert chosen["draft_model-8"]["num_speculative_tokens"] == 8
    assert chosen["ouroboros"] == given


def test_passes_share_the_prompts_out_when_they_are_to_be_fresh():
    # Categories in turn, as many as passes: every n-th prompt is of one category.
    prompts = tuple(SimpleNamespace(index=index, category="abc"[index % 3]) for index in range(13))
    plan = Plan("m", PROMPTS, prompts, {}, repeats=2, concurrency=(1,))
    assert {plan.prompts_of(number) for number in range(3)} == {(0, 13)}
    assert plan.deal_prompts() == plan
    fresh = replace(plan, fresh_prompts=True).deal_prompts()
    shares = [fresh.prompts[slice(*fresh.prompts_of(number))] for number in range(3)]
    assert [len(share) for share in shares] == [5, 4, 4]
    for share in shares:
        assert {prompt.category for prompt in share} == {"a", "b", "c"}
        assert list(share) == sorted(share, key=lambda prompt: prompt.index)
    assert sorted(prompt.index for prompt in fresh.prompts) == [*range(13)]


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
        ("driver.recv(); sys.exit('the reason')", r"died \(exit status 1\)"),
        ("sys.stderr.write('the reason'); os.write(driver.fileno(), b'00')", "died"),
        (
            "sys.stderr.write('the reason'); sys.stderr.flush()\n"
            "subprocess.Popen(['sleep', '60'], close_fds=False); os._exit(3)",
            r"died \(exit status 3\)",  # the grandchild still holds the connection
        ),
        (
            "driver.recv(); sys.stderr.write('the reason'); sys.stderr.flush()\n"
            "driver.send({'error': 'no tree'}); driver.recv()",
            "failed: no tree",
        ),
    ],
)
def test_a_child_that_fails_ends_the_run_with_its_last_lines(program, message, monkeypatch, capsys):
    monkeypatch.setattr(driver, "WORKER", ("-c", CONNECT + program))
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


def test_a_part_that_takes_long_is_told_again_where_there_is_no_terminal(monkeypatch, capfd):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.1)
    with progress.Progress(3, unit="passes") as parts:
        parts.begin("load")
        parts.begin("measure")
        time.sleep(0.35)
    time.sleep(0.2)
    first, second, *others = capfd.readouterr().err.splitlines()
    assert first == "[0/3 passes, 0:00] load"
    assert second == "[1/3 passes, 0:00] measure"
    assert others
    for line in others:
        assert re.fullmatch(r"\[1/3 passes, 0:\d\d\] still at measure, \d+ s", line)
    time.sleep(0.3)
    assert not capfd.readouterr().err  # it is over
