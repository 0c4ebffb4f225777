"""The GPU benchmarks run end to end at tiny sizes, without a GPU too, and refuse wrong kernels."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.integration.engines import EXAMPLES

HARNESS = EXAMPLES / "gpu"
LAUNCHES = EXAMPLES.parent / "tests/integration/cuda/v2_launches.json"
PARTS = ("operators", "twins", "engine", "step_time", "peers", "kernels", "engines")
KERNELS = {"place", "top_k", "walk", "compact", "learn", "grow", "together", "seed"}
KERNELS |= {"grow-2", "grow-4"}


def load(name, monkeypatch):
    """A module of the benchmarks; the environment and the path are as before after the test."""
    monkeypatch.syspath_prepend(HARNESS)
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    return importlib.import_module(name)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_first_hour_runs_at_tiny_sizes_without_a_verdict(tmp_path):
    command = ["bash", str(HARNESS / "first_hour.sh"), str(tmp_path), "--smoke"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    statuses = re.findall(r"^(\w+): exit status (\d+)", done.stdout, re.MULTILINE)
    assert statuses == [(name, "0") for name in PARTS], done.stdout + done.stderr
    lines = (tmp_path / "verdict.txt").read_text().splitlines()
    assert lines[0].startswith("cpu, driver None, vllm_recycle ")
    assert "kernels against their references: none ran" in lines
    assert lines[-1] == "0 of 0 estimates held"
    assert sum(line.endswith(": not measured") for line in lines) > 10

    reports = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("kernels", "step_time", "peers")
    )
    kernels, step_time, peers = reports
    for report in (kernels, step_time):
        assert report["conditions"]["times"].startswith("mean nothing")
    log = (tmp_path / "kernels.log").read_text()
    assert len(kernels["marks"]) == log.count("not judged: ") == 3
    for row in kernels["attention"]:
        assert {"tree", "chain", "sdpa", "copy"} <= set(row["times"])
    assert [step["batch"] for step in kernels["steps"]] == [1, 2]
    for step in kernels["steps"]:
        assert set(step["host_us"]) == set(step["times"]) == KERNELS
        assert min(step["nodes"], step["accepted"]) > 0
    assert any(step["moved_rows"] for step in kernels["steps"])

    results = [(row["name"], row["batch"]) for row in step_time["results"]]
    assert results == [*itertools.product(("plain", "tree-8", "grown-8"), (1, 2))]
    for row in step_time["results"]:
        assert min(row["step_ms"], row["ratio"]) > 0
        assert (row["requests_scheduled"], row["rows_scheduled"]) == (row["batch"], row["rows"])
    for profile in step_time["profiles"].values():
        assert (tmp_path / profile["trace"]).stat().st_size > 0
    log = (tmp_path / "step_time.log").read_text()
    assert "not judged: step of 8 rows / plain step, batch 1" in log

    results = [(row["concurrency"], row["method"]) for row in peers["results"]]
    assert results == [*itertools.product((1, 4), ("none", "ngram_gpu", "token_recycling"))]
    assert all(row["outputs_equal"] for row in peers["results"])


@pytest.mark.parametrize("broken", ["place", "walk", "compact", "grow", "learn"])
def test_a_kernel_that_is_wrong_ends_the_run(broken, monkeypatch):
    module, kernels = load("kernel_step", monkeypatch), load("kernels", monkeypatch)
    torch.manual_seed(0)
    inputs = module.StepInputs(module.StepCase(batch=2, rows=13, **kernels.TINY_STEP))
    inputs.worths += broken == "grow"
    wrong = {
        "walk": lambda: dataclasses.replace(inputs.walked, lengths=inputs.walked.lengths + 1),
        "place": lambda: inputs.row_token_ids,  # and nothing is placed
    }
    if broken != "grow":
        setattr(inputs, broken, wrong.get(broken, lambda: None))
    with pytest.raises(SystemExit, match=f"wrong: {broken}: "):
        module.check_step(inputs)


def test_attention_that_is_wrong_in_a_row_ends_the_run(monkeypatch):
    module = load("kernel_attention", monkeypatch)
    case = module.AttentionCase(module.Heads("tiny", 4, 2, 16), rows=16, context=20, batch=2)
    inputs = module.AttentionInputs(case)
    tree = module.load_tree("default").prefix(15)
    module.check_attention("right", inputs, tree, module.sdpa(inputs, tree))
    # The template without its last node has another row there, a sibling of it.
    other = module.TreeTemplate((*tree.nodes[:-1], (0, 2)))
    with pytest.raises(SystemExit, match="wrong: other: a row is off by"):
        module.check_attention("other", inputs, tree, module.sdpa(inputs, other))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["kernels.py", "step_time.py"])
def test_a_missing_gpu_is_said_at_once(name, tmp_path):
    command = [sys.executable, str(HARNESS / name), "--json", str(tmp_path / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no GPU: --smoke runs" in done.stderr


def test_a_configuration_that_fails_ends_the_run_with_its_last_line(tmp_path, monkeypatch):
    step_time = load("step_time", monkeypatch)
    script = tmp_path / "dies.py"
    script.write_text("import sys; sys.exit('the reason')")
    monkeypatch.setattr(step_time, "ENGINE", script)
    task = step_time.Task({"speculative_config": None}, 1, (1,), steps=1, passes=1, trace=None)
    with pytest.raises(SystemExit, match="the reason\nplain: exit status 1"):
        step_time.run_child(task, "plain", tmp_path / "reply.json")


def test_the_largest_gap_is_where_no_stream_is_busy(monkeypatch):
    engine = load("step_time_engine", monkeypatch)

    def event(start, end, name, kind="kernel"):
        return {"ph": "X", "cat": kind, "ts": start, "dur": end - start, "name": name}

    events = [
        event(0, 10, "while the profiler starts"),
        event(250, 400, "a"),
        event(300, 350, "b"),  # within a, on another stream
        event(450, 500, "c"),
        event(500, 700, "host code", "cpu_op"),
        event(700, 1000, "d", "gpu_memcpy"),
    ]
    found = engine.find_gaps(events)
    assert found["largest_gap_ms"] == 0.2
    assert (found["gap_after"], found["gap_before"]) == ("c", "d")
    assert found["idle_share"] == pytest.approx(250 / 750)
    assert engine.find_gaps(events[4:5])["largest_gap_ms"] is None


JUNIT = """<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1">
<testcase name="right"/><testcase name="wrong"><failure/></testcase><testcase name="left out"/>
</testsuite></testsuites>"""


def test_the_verdict_of_what_was_measured(tmp_path, monkeypatch):
    verdict = load("verdict", monkeypatch)
    (tmp_path / "twins.xml").write_text(JUNIT)
    results = [
        {"name": name, "batch": batch, "ratio": ratio, "step_ms": 6.0}
        for name, batch, ratio in (("plain", 1, 1.0), ("grown-64", 1, 1.12), ("grown-16", 8, 1.5))
    ]
    marks = [{"verdict": "FAIL", "mark": "a gap, ms", "value": 0.31, "limit": 0.2}]
    report = {"results": results, "marks": marks}
    (tmp_path / "step_time.json").write_text(json.dumps(report))
    lines = list(verdict.verdict(tmp_path))
    for line in (
        "kernels against their references: 1 of 2 failed: wrong",
        "engines against plain vLLM: not run, there is no engines.xml",
        "kernels: not run",
        "step_time: FAIL: a gap, ms: 0.31, limit 0.2",
        "growing a tree, us: not measured",
        "a step of 64 rows / a plain step, one request, 2k: as estimated",
        "the same of 8 requests with 16 rows: 1.5 where 1.14 to 1.19 was estimated, "
        "1.26 times more",
        "2 of 3 estimates held",
    ):
        assert line in lines


def test_a_kit_keeps_the_kernels_of_its_gpu_in_their_places(tmp_path, monkeypatch):
    kit = load("make_kit", monkeypatch)

    def library(*entries):
        packed = b"".join(
            kit.ENTRY.pack(kind, 0, kit.ENTRY.size, len(body), arch) + body
            for kind, arch, body in entries
        )
        return b"code" + b"\x50\xed\x55\xba\1\0\x10\0" + len(packed).to_bytes(8, "little") + packed

    used, unused = (f"FlashAttnFwdSm90 Li{n}ENS_10bfloat16_tEf".encode() for n in (64, 96))
    ours = [(2, 90, b"a kernel"), (2, 90, used)]
    others = [(2, 80, b"another"), (1, 90, b"ptx"), (2, 90, unused)]
    path = tmp_path / "library.so"
    path.write_bytes(library(*ours, *others) + library(ours[0]))
    kit.prune(path)
    zeros = [(kind, 121, bytes(len(body))) for kind, _, body in others]
    assert path.read_bytes() == library(*ours, *zeros) + library(ours[0])


def test_estimates_are_of_the_graphs_and_launches_that_there_are(monkeypatch):
    estimates = load("estimates", monkeypatch)
    described = (EXAMPLES / "benchmarks" / "README.md").read_text()
    for table in (estimates.step_table(), estimates.trunk_table()):
        assert "\n".join(table) in described
    assert len([*estimates.program_table()]) > 10
    launches = json.loads(LAUNCHES.read_text())
    grown, along = (launches[kind]["total"]["drafting"] for kind in ("grown", "head"))
    assert along - grown == estimates.HEAD_LAUNCHES
    launched = launches["grown"]
    names = {name for part in ("placing", "sampling", "drafting") for name in launched[part]}
    assert names == {*estimates.LAUNCHES_US, *estimates.LOGITS}
    ratios = {(max(rows), len(rows)): estimates.ratios(rows) for rows in estimates.STEPS}
    judged = json.loads((HARNESS / "estimates.json").read_text())
    found = [one for one in judged if one["value"] == ["ratio"]]
    assert len(found) == 3
    for one in found:
        rows = int(one["where"]["name"].removeprefix("grown-"))
        said = [round(ratio, 2) for ratio in ratios[rows, one["where"]["batch"]]]
        assert [one["from"], one["to"]] == said
