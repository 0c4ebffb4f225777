"""The short examples, as a user runs them; tests/integration/server covers the server."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from vllm import LLM, AsyncEngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

from tests.integration.engines import EXAMPLES, TRUNK, spare_later_engines
from vllm_recycle.core.tree import load_tree
from vllm_recycle.integration.options import OuroborosOptions

DRAFT_MODEL = TRUNK["model"]
# Options of scripts that change the configuration of an engine, with a value; and the others.
CONFIGURING = {"--draft-model": DRAFT_MODEL, "--state": "state", "--dtype": "float32"}
OTHERS = {"--batch", "--chat", "--epochs", "--format", "--help", "--json", "--learning-rate"}
OTHERS |= {"--max-nodes", "--max-replicas", "--max-tokens", "--min-replicas", "--model"}
OTHERS |= {"--num-prompts", "--output", "--prompts", "--replicas", "--samples", "--workers"}
MISSING = set() if find_spec("arctic_inference") else {"suffix"}
# Scripts that make no engine themselves, or what others share; test_trl.py runs TRL's.
WITHOUT_ENGINE = {"ray_replicas.py", "trl_grpo.py", "what_would_i_gain.py"}
SCRIPTS = sorted({path.name for path in EXAMPLES.glob("*.py")} - WITHOUT_ENGINE)


@pytest.fixture
def run_example(monkeypatch, tmp_path, capfd):
    """Run an example in this process, which has imported vLLM; gives what it prints."""
    monkeypatch.chdir(tmp_path)
    llms, start = [], LLM.__init__

    def started(llm, *args, **kwargs):
        llms.append(llm)
        start(llm, *args, **kwargs)

    monkeypatch.setattr(LLM, "__init__", started)
    spare_later_engines()

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    yield run
    for llm in llms:
        llm.llm_engine.engine_core.shutdown()


class ConfiguredError(Exception):
    """vLLM has completed the configuration of an engine."""


def configured(*_, **__):
    raise ConfiguredError


@pytest.fixture
def stops_when_configured(monkeypatch, tmp_path):
    """Let engines, `vllm serve` and those on Ray end when they are configured.

    Ray need not be installed.
    """

    def on_ray(engine_kwargs, model_source=None, model_loading_config=None, **_):
        model = model_source or model_loading_config["model_source"]
        LLM(model, **{key: engine_kwargs[key] for key in engine_kwargs if key != "chat_template"})

    def start(command, *args, **kwargs):
        if "serve" not in command:  # what vLLM asks of the machine
            return popen(command, *args, **kwargs)
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(command[2:])
        parsed.model = parsed.model_tag
        return configured(AsyncEngineArgs.from_cli_args(parsed).create_engine_config())

    popen, ray = subprocess.Popen, MagicMock()
    ray.data.llm.vLLMEngineProcessorConfig = ray.serve.llm.LLMConfig = on_ray
    ray.remote = lambda **_: lambda worker: SimpleNamespace(remote=worker)
    modules = {"ray": ray, "ray.data.llm": ray.data.llm, "ray.serve.llm": ray.serve.llm}
    for name, module in {**modules, "ray_replicas": None}.items():
        monkeypatch.setitem(sys.modules, name, module)
    del sys.modules["ray_replicas"]  # is imported with that, and not seen by other tests
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(LLMEngine, "__init__", configured)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "1000")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)


def options_of(script, monkeypatch):
    """What the parser of a script accepts."""
    found = {}

    def parse(parser, *_):
        found.update({action.option_strings[-1]: action for action in parser._actions})
        raise ConfiguredError

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        with pytest.raises(ConfiguredError):
            runpy.run_path(str(script), run_name="__main__")
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_combination_of_options_configures_an_engine(
    script, stops_when_configured, monkeypatch
):
    options = options_of(EXAMPLES / script, monkeypatch)
    assert options.keys() <= {*CONFIGURING, *OTHERS, "--method"}, "list what is new above"
    values = [[[], [name, CONFIGURING[name]]] for name in options if name in CONFIGURING]
    if "--method" in options:
        names = {*options["--method"].choices} - MISSING
        values.append([["--method", name] for name in names])
    for combination in itertools.product(*values):
        monkeypatch.setattr(sys, "argv", [script, *itertools.chain(*combination)])
        with pytest.raises(ConfiguredError):
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("token_recycling", marks=pytest.mark.versions),
        pytest.param("ouroboros", marks=pytest.mark.slow),
    ],
)
def test_offline_batch_prints_every_output_and_what_was_accepted(method):
    """Compiled: the smallest model there is, which has two layers."""
    arguments = [f"--model={DRAFT_MODEL}", "--num-prompts=3", "--max-tokens=16"]
    arguments += [f"--draft-model={DRAFT_MODEL}"] * (method == "ouroboros")
    command = [sys.executable, str(EXAMPLES / "offline_batch.py"), *arguments]
    compiled = os.environ | {"TORCH_COMPILE_DISABLE": "0"}
    output = subprocess.check_output(command, env=compiled, text=True)
    assert len(re.findall(r"^[\"']Question: .*\.\.\. -> [\"'].+[\"']$", output, re.MULTILINE)) == 3
    assert re.search(r"^\d+ trees verified", output, re.MULTILINE)
    assert mean_accepted(output) >= 1  # where the machine is busy, rows may be too dear for trees


def test_custom_tree_is_written_shown_and_used(run_example, tmp_path):
    output = run_example("custom_tree.py", "--max-tokens=16")
    assert load_tree(tmp_path / "my_tree.json").num_nodes == 16
    shown = "^mine: 16 nodes, depth 4, nodes per depth 5 / 6 / 4 / 1"
    assert re.search(shown, output, re.MULTILINE)
    assert re.search(r"\nAnswer: ?\w+", output)
    trees, nodes = re.search(r"(\d+) trees of at most 16 nodes, (\d+) nodes", output).groups()
    assert 0 < int(trees) < int(nodes) <= 16 * int(trees)
    assert mean_accepted(output) > 1


def test_a_hint_makes_it_fewer_steps(run_example):
    output = run_example("hints.py", "--max-tokens=48")
    none, right, _wrong = map(int, re.findall(r"^48 tokens, (\d+) steps$", output, re.MULTILINE))
    assert right < none


@pytest.mark.slow
def test_what_would_be_gained_is_said_for_every_load(run_example):
    eager = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    arguments = ["--num-prompts=6", "--max-tokens=16", "--repeats=1", "--concurrency=1,2"]
    arguments += ["--methods=none,ngram", f"--engine-args={json.dumps(eager)}", "--dtype=float32"]
    output = run_example("what_would_i_gain.py", *arguments)
    says = r"no method is faster|ngram is \d\.\d\d times as fast as plain vLLM"
    assert len(re.findall(rf"^[12] in flight: (?:{says})", output, re.MULTILINE)) == 2


@pytest.mark.parametrize(
    ("speedups", "said"),
    [
        ([1.4, 1.2, 1.3], "1.30 times as fast as plain vLLM (1.20 to 1.40 over 3 passes)"),
        ([1.4, 0.9, 1.3], "not in every pass (0.90 to 1.40 over 3 passes). Give more prompts."),
        ([0.9, 0.8, 0.95], "no method is faster than plain vLLM"),
    ],
)
def test_a_gain_is_one_of_every_pass(speedups, said):
    verdict = runpy.run_path(str(EXAMPLES / "what_would_i_gain.py"))["verdict"]
    config = {"method": "suffix"}
    results = [
        {"method": name, "concurrency": 4, "speedups": given, "speedup": statistics.median(given)}
        for name, given in (("none", [1.0] * 3), ("suffix", speedups))
    ]
    methods = {"none": None, "suffix": config}
    found = verdict({"conditions": {"methods": methods}, "results": results}, 4)
    assert said in found
    assert (json.dumps(config) in found) == (min(speedups) > 1)


def test_a_template_is_measured_best_first(run_example, tmp_path):
    arguments = ["--num-prompts=2", "--max-tokens=24", "--dtype=float32", "--max-nodes=12"]
    output = run_example("tune_tree.py", *arguments)
    tree = load_tree(tmp_path / "tree.json")
    expected = list(tree.provenance["mean accepted tokens by nodes"].values())
    assert 1 < expected[0] < expected[-1]
    assert expected == sorted(expected)
    assert tree.provenance["trees"] > 0
    assert tree.num_nodes == 12
    assert f'"tree": "{tmp_path / "tree.json"}"' in output.splitlines()[-1]


def test_the_ablation_switches_one_component_on_or_off_a_line(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "benchmarks")
    from ouroboros_ablation import LINES, arguments

    def changed(one, other):
        return {key for key in one | other if one.get(key) != other.get(key)}

    added, missing = list(LINES.values())[:4], list(LINES.values())[4:]
    assert [len(changed(*pair)) for pair in pairwise(added)] == [1, 2, 1]
    assert added[-1] == {}
    assert [len(off) for off in missing] == [1] * 4
    for off in LINES.values():
        OuroborosOptions.parse({"method": "ouroboros", "model": "DIR"} | off, on_gpu=False)
    given = arguments("DIR", 5)
    assert given[given.index("--draft-model=DIR") + 1] == "--draft-tokens=5"
    assert sum(one == "--speculative-config" for one in given) == len(LINES)


def mean_accepted(output):
    return float(re.search(r"^mean accepted tokens: ([\d.]+) a step$", output, re.MULTILINE)[1])


@pytest.mark.slow
def test_roll_outs_are_sampled_and_trained_on(run_example):
    arguments = ["--prompts=2", "--samples=2", "--epochs=2", "--max-tokens=12"]
    output = run_example("rollouts.py", *arguments)
    says = r"^epoch [01]: reward (\d\.\d\d), (\d+\.\d\d) tokens a call, sampling took"
    steps = re.findall(says, output, re.MULTILINE)
    assert len(steps) == 2
    assert all(float(tokens) >= 1 for _, tokens in steps)
