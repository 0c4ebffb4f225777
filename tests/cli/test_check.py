"""`vllm-recycle check`: what is supported, what refuses, and what a start would say as well."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.integration.engines import OUROBOROS, TARGET
from tests.integration.models import heads
from tests.integration.models.derived_models import qwen2_audio
from vllm_recycle.cli import main
from vllm_recycle.kernels.cpu import build

VOCAB, FLAGS = 4096, ["--dtype", "float32", "--max-num-seqs", "2"]


@pytest.fixture(autouse=True)
def _logging_level(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")


def check(capsys, *flags: str, config: dict | None = None, model: str = TARGET) -> tuple:
    """The exit status, and what each line says by its name."""
    given = [] if config is None else ["--speculative-config", json.dumps(config)]
    status = main(["check", model, *FLAGS, *given, *flags])
    lines = capsys.readouterr().out.splitlines()
    return status, {line[:18].rstrip(): line[18:] for line in lines}


RECYCLING = {"method": "token_recycling"}
AS_FLAGS = ["--spec-method", "ouroboros", "--spec-model", OUROBOROS["model"]]


@pytest.mark.parametrize(
    ("config", "flags", "drafts", "num_bytes"),
    [
        (None, [], "grown trees, at most 80 nodes", None),
        # An entry is a head, 8 successors and a salt; a MiB has room for 16,384 of them. For each
        # class of requests, four with private ones, and rank of own and shared entries there are
        # five pairs of counts.
        (RECYCLING | {"tree": "default", "contexts": [1], "context_mib": 1}, [],
         "tree default, at most 80 nodes", 4 * 10 * (VOCAB + 16384) + 4 * 8 * 2 * 8 * 5 * 2),
        (OUROBOROS | {"guesses": 5, "phrase_length": 4}, [], "tree ", 4 * (VOCAB + 1) * 5 * 3),
        # Adapters and replicas.
        (None, ["--enable-lora", "--max-num-batched-tokens", "128", "--data-parallel-size", "2"],
         "grown trees", None),
        # Our methods by vLLM's flag.
        (None, ["--spec-method", "token_recycling"], "grown trees", None),
        *((config, AS_FLAGS, "", None) for config in (None, {}, {"method": None, "model": None})),
    ],
)  # fmt: skip
def test_what_is_supported(config, flags, drafts, num_bytes, capsys):
    status, said = check(capsys, *flags, config=config)
    assert status == 0, said
    method = "ouroboros" if flags is AS_FLAGS else (config or RECYCLING)["method"]
    assert said["supported"] == f"{TARGET} with {method}"
    assert said["drafts"].startswith(drafts)
    assert num_bytes is None or said["tables"].startswith(f"{num_bytes:,} bytes on each rank")
    assert "refused" not in said
    assert {"g++", "ray", "arctic_inference"} <= said.keys()


def test_the_memory_for_a_state_file_is_stated(capsys, tmp_path):
    _, said = check(capsys, config=RECYCLING | {"matrix_file": str(tmp_path / "matrix")})
    expected = (
        "weights and KV cache, and twice as many on the host of the first rank for matrix_file"
    )
    assert said["tables"].endswith(expected)


def test_a_trunk_is_described(capsys, tmp_path):
    trunk = {"method": "eagle", "model": heads.eagle(tmp_path / "head")}
    status, said = check(capsys, config=RECYCLING | {"trunk": trunk})
    assert status == 0, said
    assert said["drafts"] == "grown trees, at most 80 nodes; trunks of at most 4 tokens by eagle"


def test_of_a_multimodal_model_the_text_part_is_supported(capsys, tmp_path):
    model = qwen2_audio(tmp_path / "model")
    status, said = check(capsys, model=model)
    assert (status, said["drafts"]) == (0, "tree chain, at most 24 nodes")
    status, said = check(capsys, model=model, config=RECYCLING | {"tree": "default"})
    assert status == 1
    assert "a multimodal model without --language-model-only" in said["refused"]
    status, said = check(capsys, "--language-model-only", model=model)
    assert (status, said["drafts"]) == (0, "grown trees, at most 80 nodes")


@pytest.mark.parametrize(
    ("flags", "config", "message"),
    [
        (["--kv-cache-dtype", "fp8"], RECYCLING | {"preset": "paper"},
         "does not support --kv-cache-dtype fp8"),
        ([], {"method": "ngram", "num_speculative_tokens": 2}, "got method 'ngram', expected one"),
        (["--max-model-len", "99999999"], None, "max_model_len"),
    ],
)  # fmt: skip
def test_what_is_refused_names_one_thing(flags, config, message, capsys):
    status, said = check(capsys, *flags, config=config)
    assert status == 1
    assert message in said["refused"]
    assert "supported" not in said
    assert "g++" in said


@pytest.mark.parametrize("variable", ["off", '{"method": "token_recycling", "max_nodes": 7}'])
def test_the_environment_stands_for_the_method(variable, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_RECYCLE", variable)
    nodes = 80 if variable == "off" else 7
    assert check(capsys)[1]["drafts"] == f"grown trees, at most {nodes} nodes"
    status, said = check(capsys, "--pipeline-parallel-size", "2")
    assert status == 1
    assert "does not support --pipeline-parallel-size above 1" in said["refused"]


def test_a_model_that_is_not_there(capsys, tmp_path):
    expected = f"no such folder {tmp_path}/none, expected a model directory or ORG/NAME on the hub"
    status, said = check(capsys, model=f"{tmp_path}/none")
    assert (status, said["refused"]) == (1, f"MODEL: {expected}")
    status, said = check(capsys, config={"method": "ouroboros", "model": f"{tmp_path}/none"})
    assert (status, said["refused"]) == (1, f"model of --speculative-config: {expected}")


def test_what_is_missing_says_how_to_get_it(tmp_path):
    """In a process of its own, with a path that has no compiler."""
    command = [sys.executable, "-m", "vllm_recycle", "check", TARGET, *FLAGS]
    environment = {**os.environ, "PATH": str(tmp_path), "CXX": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert "Triton" not in result.stderr
    said = "refused           no C++ kernels, so that an engine decodes without drafts"
    assert said in result.stdout
    assert "g++               missing, to compile CPU kernels" in result.stdout


def test_kernels_are_built_ahead_without_a_model(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "FLAGS", ("-O0", *build.FLAGS[1:]))  # in a tenth of the time
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["check", "--build"]) == 0
    (kept,) = tmp_path.glob("vllm_recycle/*.so")
    assert f"{'kernels':18}{kept}\n" in capsys.readouterr().out
    # And where they cannot be kept, or compiled.
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    assert main(["check", "--build"]) == 1
    assert f"{'not built':18}the kernels cannot be kept (" in capsys.readouterr().out
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    assert main(["check", "--build"]) == 1
    assert f"{'not built':18}no C++ compiler found\n" in capsys.readouterr().out


def test_a_draft_model_with_other_token_ids_is_warned_of(capsys, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(OUROBOROS["model"], draft)
    config = {"method": "ouroboros", "model": str(draft)}
    assert "warning" not in check(capsys, config=config)[1]
    file = draft / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other = [token for token, token_id in vocab.items() if token_id in (500, 600)]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(tokenizer))
    status, said = check(capsys, config=config)
    assert status == 0
    assert said["warning"].startswith(f"the draft model {draft} has other ids for 2 of the 4096")
    file.write_text('{"model": 1}')  # vLLM reads the target's alone
    assert "warning" not in check(capsys, config=config)[1]
