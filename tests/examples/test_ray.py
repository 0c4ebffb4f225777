"""The examples on Ray as a user runs them: real Ray, a real engine, a real client."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.integration.engines import EXAMPLES, engine
from tests.integration.server.ray_processes import marked, wait_for_end

pytest.importorskip("ray", reason="needs Ray, which `make ray` installs")

FLOAT32 = ["--max-tokens=64", "--dtype=float32"]
GREEDY = SamplingParams(temperature=0, max_tokens=64)
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def plain():
    """vLLM without speculation."""
    with engine() as llm:
        yield llm


def run_example(name: str, *arguments: str, cwd: Path, most_states: int = 1) -> str:
    """What it prints on stdout; it leaves no process, and what replicas have learnt."""
    command = [sys.executable, str(EXAMPLES / name), "--state=state", *arguments]
    # To files: a pipe is open for as long as a process has it.
    with marked() as environment, (cwd / "out").open("w") as out, (cwd / "log").open("w") as log:
        run = subprocess.run(command, cwd=cwd, env=environment, stdout=out, stderr=log, timeout=500)
        output = (cwd / "out").read_text()
        assert run.returncode == 0, output[-3000:] + (cwd / "log").read_text()[-6000:]
        wait_for_end(environment)
    assert 1 <= len([*(cwd / "state").glob("*.safetensors")]) <= most_states
    return output


def read_table(output: str) -> dict[str, float]:
    names, numbers = re.search(r"^( +tokens .*)\n(.*)$", output, re.MULTILINE).groups()
    table = dict(zip(re.split("  +", names.strip()), map(float, numbers.split()), strict=True))
    assert table["tokens"] > table["target calls"]
    assert table["tokens a call"] > 1
    return table


def test_ray_data_writes_what_vllm_says_without_speculation(plain, tmp_path):
    import pandas

    arguments = [*FLOAT32, "--num-prompts=24", "--replicas=1", "--output=answers"]
    output = run_example("ray_batch.py", *arguments, cwd=tmp_path)
    answers = pandas.read_parquet(tmp_path / "answers")
    lines = (EXAMPLES / "prompts" / "gsm8k.jsonl").read_text().splitlines()[:24]
    prompts = [json.loads(line)["prompt"] for line in lines]
    results = plain.generate(prompts, GREEDY, use_tqdm=False)
    expected = {result.prompt: result.outputs[0].text for result in results}
    assert dict(zip(answers["prompt"], answers["answer"], strict=True)) == expected
    assert read_table(output)["tokens"] == answers["num_tokens"].sum()


def test_ray_serve_answers_as_vllm_does_without_speculation(plain, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from server_and_client import CHAT_TEMPLATE, CODE, QUESTION

    output = run_example("ray_serve.py", *FLOAT32, "--max-replicas=1", cwd=tmp_path)
    messages = [{"role": "user", "content": QUESTION}]
    (completion,) = plain.generate([CODE], GREEDY, use_tqdm=False)
    (chat,) = plain.chat(messages, GREEDY, chat_template=CHAT_TEMPLATE, use_tqdm=False)
    said = f"{CODE}{completion.outputs[0].text}\n{chat.outputs[0].text}\nreplicas: 1\n"
    assert output.startswith(said)
    assert read_table(output)


def test_roll_outs_go_on_with_new_weights(tmp_path):
    arguments = ["--prompts=2", "--samples=2", "--epochs=2", "--max-tokens=24", "--workers=2"]
    # A worker that writes long after the other has ended removes that one's file.
    output = run_example("ray_rollouts.py", *arguments, cwd=tmp_path, most_states=2)
    assert len(re.findall(r"^epoch [01]: reward .* tokens a call", output, re.MULTILINE)) == 2
