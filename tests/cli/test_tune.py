"""`vllm-recycle tune`: the search, an interruption, refused arguments."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from commands import DRAFT_MODEL, FAKE_WORKER, MODEL, PROMPTS, refused

from vllm_recycle.cli import main
from vllm_recycle.cli.bench import driver
from vllm_recycle.cli.bench.arguments import number_range
from vllm_recycle.cli.tune.ouroboros import State
from vllm_recycle.integration.options import OuroborosOptions

SMALL = [
    "--dtype=float32",
    "--max-tokens=16",
    '--engine-args={"enforce_eager": true, "kv_cache_memory_bytes": 67108864}',
]
SEARCH = ["--gamma=2:14:2", "--window=15:18", "--phrase-length=5,7", "--num-prompts=8"]
BEST = {"gamma": 6, "window": 16, "phrase_length": 7, "max_forwards": 2}
# Of SEARCH, at the default range of the last: 4 of it, then 7 gammas, of which the least has one
# form, 4 windows and 2 phrase lengths in two forms, three timed passes each.
TIMED_PASSES = 3 * (4 + 2 * (7 + 4 + 2) - 1)


def tune(output: Path, *arguments: str) -> list[str]:
    common = [f"--model={MODEL}", f"--draft-model={DRAFT_MODEL}", f"--prompts={PROMPTS}"]
    return ["tune", *common, f"--output={output}", *arguments]


def printed_config(output: str) -> dict[str, object]:
    """What the last line says to give to vLLM."""
    option, value = shlex.split(output.splitlines()[-1])
    assert option == "--speculative-config"
    return json.loads(value)


@pytest.fixture
def passes(monkeypatch, tmp_path):
    """Replace the workers, fastest at BEST, and list the passes that they are asked for."""
    log = tmp_path / "log"
    monkeypatch.setattr(driver, "WORKER", FAKE_WORKER)
    monkeypatch.setenv("FAKE_WORKER_BEST", json.dumps([BEST]))
    monkeypatch.setenv("FAKE_WORKER_LOG", str(log))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.slow
def test_the_search_runs_real_engines(tmp_path, capsys):
    output = tmp_path / "ouroboros.json"
    ranges = ["--gamma=2,6", "--window=4", "--phrase-length=4", "--max-forwards=4"]
    ranges += ["--repeats=1", "--num-prompts=2"]
    assert main(tune(output, *SMALL, *ranges)) == 0
    config = json.loads(output.read_text())
    assert config == printed_config(capsys.readouterr().out)
    assert (config["window"], config["guesses"], config["phrase_length"]) == (4, 4, 4)
    measured = json.loads((tmp_path / "ouroboros.state.json").read_text())["measurements"]
    keys = ("gamma", "max_forwards")  # which is at most gamma
    sizes = [tuple(one["config"][key] for key in keys) for one in measured]
    assert sizes == [(2, 2), (6, 4)]
    assert tuple(config[key] for key in keys) in sizes
    for one in measured:
        most = one["config"]["max_forwards"] * one["draft_rounds"]
        assert 0 < one["draft_rounds"] <= one["draft_forwards"] <= most


def test_the_search_finds_the_fastest_of_each_range(passes, tmp_path, capsys):
    output = tmp_path / "ouroboros.json"
    assert main(tune(output, *SEARCH)) == 0
    text = capsys.readouterr().out
    config = json.loads(output.read_text())
    assert config == printed_config(text)
    fixed = {"method": "ouroboros", "model": str(DRAFT_MODEL), "preset": "paper"}
    assert config == fixed | {"guesses": 16} | BEST
    given = {key: value for key, value in config.items() if key != "method"}
    assert OuroborosOptions.parse(given, on_gpu=False).branches == 3
    best = [line.split(":")[0] for line in text.splitlines() if line.endswith(", best")]
    forms = [", max_forwards 2", ", max_forwards 6"]
    assert best == [
        "max_forwards 2, gamma 8, window 16, phrase_length 5",
        *(f"gamma 6, window 16, phrase_length 5{form}" for form in forms),
        *(f"window 16, gamma 6, phrase_length 5{form}" for form in forms),
        *(f"phrase_length 7, gamma 6, window 16{form}" for form in forms),
    ]

    # A first pass that is not timed and three that are, on prompts of their own.
    gamma_14 = [one for one in passes() if one["config"]["gamma"] == 14]
    of_one = [(one["start"], one["stop"]) for one in gamma_14 if one["config"]["max_forwards"] == 2]
    assert of_one == [(0, 2), (2, 4), (4, 6), (6, 8)]
    # Interleaved: no candidate has a second turn before all had a first.
    forwards = [one["config"]["max_forwards"] for one in passes()[4:16]]
    assert [sorted(forwards[turn : turn + 4]) for turn in (0, 4, 8)] == [[1, 2, 4, 8]] * 3


def test_the_search_is_never_behind_that_of_the_paper(passes, monkeypatch, tmp_path):
    # In the middle of the ranges few forwards are the best, but with a window that is out of range.
    paper = {"gamma": 4, "window": 18, "phrase_length": 7, "max_forwards": 4}
    few = BEST | {"gamma": 8, "window": 14}
    monkeypatch.setenv("FAKE_WORKER_BEST", json.dumps([few, paper]))
    output = tmp_path / "ouroboros.json"
    assert main(tune(output, *SEARCH)) == 0
    config = json.loads(output.read_text())
    assert {key: config[key] for key in BEST} == paper
    # Few forwards were searched beside it.
    configs = [one["config"] for one in passes()]
    assert any(one["max_forwards"] == 2 and one["window"] == 18 for one in configs)


def test_what_is_beyond_the_paper_is_at_most_gamma(passes, tmp_path):
    output = tmp_path / "ouroboros.json"
    ranges = ["--gamma=3", "--window=16", "--phrase-length=7", "--num-prompts=4"]
    assert main(tune(output, *ranges)) == 0
    # 0 and 4 forwards mean 3.
    configs = [one["config"] for one in passes() if not one["start"]]
    assert [one["max_forwards"] for one in configs] == [1, 2, 3, 2, 3]


def test_fixed_keys_need_not_go_with_sizes_that_are_not_searched(passes, tmp_path):
    ranges = ["--gamma=2", "--window=4", "--phrase-length=4", "--max-forwards=1"]
    # With phrases of the paper's length these would be too many.
    guesses = '--speculative-config={"guesses": 60}'
    assert main(tune(tmp_path / "ouroboros.json", *ranges, guesses)) == 0


@pytest.mark.parametrize("kept", [1, 14, 30, TIMED_PASSES - 1])
def test_an_interrupted_search_goes_on_where_it_was(kept, passes, monkeypatch, tmp_path, capsys):
    output = tmp_path / "ouroboros.json"
    add = State.add

    def interrupt(self, **measurement):
        add(self, **measurement)
        if len(self.measurements) == kept:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(State, "add", interrupt)
        assert main(tune(output, *SEARCH)) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not output.exists()
    assert main(tune(output, *SEARCH)) == 0
    assert json.loads(output.read_text())["gamma"] == 6

    def timed(one):
        return one["start"] > 0

    assert sum(map(timed, passes())) == TIMED_PASSES  # none is made twice
    assert main(tune(output, *SEARCH)) == 0
    assert sum(map(timed, passes())) == TIMED_PASSES


def test_a_candidate_that_the_method_refuses_is_left_out(passes, tmp_path, capsys):
    output = tmp_path / "ouroboros.json"
    ranges = ["--gamma=6", "--window=20", "--phrase-length=7:8", "--num-prompts=4"]
    assert main(tune(output, *ranges)) == 0
    assert "left out: speculative_config: window * " in capsys.readouterr().out
    assert json.loads(output.read_text())["phrase_length"] == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gamma=0:4"], "got '0:4', expected integers of at least 1"),
        (["--gamma=4:2"], "got '4:2', expected"),
        (["--window=a"], "got 'a', expected"),
        (["--speculative-config={"], "--speculative-config: not JSON"),
        (['--speculative-config={"gamma": 3}'], "got 'gamma', expected none of"),
        (['--speculative-config={"preset": "paper"}'], "got 'preset', expected none of"),
        (['--speculative-config={"speed": 3}'], "unknown key 'speed', expected any"),
        (["--num-prompts=3"], "got 3 prompts, expected at least 4"),
        (["--window=99"], "no candidate can be run: speculative_config: window"),
        (["--state=/nowhere/state.json"], "no directory /nowhere"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, message, tmp_path, capsys):
    assert message in refused(tune(tmp_path / "out.json", *arguments), capsys)


def test_a_draft_model_is_asked_for(tmp_path, capsys):
    command = tune(tmp_path / "out.json")
    command.remove(f"--draft-model={DRAFT_MODEL}")
    assert "tune needs --draft-model DIR" in refused(command, capsys)


def test_the_state_of_another_run_is_refused(passes, tmp_path, capsys):
    output, state = tmp_path / "out.json", tmp_path / "out.state.json"
    one = [*SEARCH[:-1], "--num-prompts=4"]
    assert main(tune(output, *one)) == 0
    capsys.readouterr()
    line = refused(tune(output, *one, "--dtype=float32"), capsys)
    assert "is of another run, dtype auto, not float32" in line
    state.write_text("{}")
    assert "is no state of vllm-recycle tune" in refused(tune(output, *one), capsys)
    state.write_text("{")
    assert "cannot be read" in refused(tune(output, *one), capsys)


def test_ranges_have_their_last_value():
    assert number_range(1)("2:14:4") == (2, 6, 10, 14)
    assert number_range(1)("5:7") == (5, 6, 7)
    assert number_range(0)("0,4,4") == (0, 4)
