"""TRL's trainer with engines that the environment turns the method on for."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.integration.engines import EXAMPLES, TARGET
from tests.integration.server.servers import wait_until

ROOT = Path(__file__).parents[2]
TRL, VLLM = ROOT / ".venv/trl", ROOT / ".venv/vllm-0.31.0"
# Trains with rewards and a rate that move the weights, and compares the engine with the trainer.
SCRIPT = """
import sys, tempfile
sys.path.insert(0, sys.argv.pop(1))
import torch, trl_grpo
from rollouts import make_parser
from vllm import SamplingParams
trl_grpo.reward = lambda prompts, completions, **_: [float(i % 2) for i in range(len(prompts))]
token_ids = [*range(20, 60)]
def of_engine():
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
    pairs = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([step[token_id].logprob for token_id, step in pairs])
with tempfile.TemporaryDirectory() as folder:
    trainer = trl_grpo.make_trainer(make_parser("").parse_args(), folder)
    llm = trainer.vllm_generation.llm
    before = of_engine()
    trainer.train()
    trainer.vllm_generation.sync_weights()
    with torch.no_grad():
        logits = trainer.model.eval()(torch.tensor([token_ids])).logits[0, :-1]
    of_policy = logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    print("CHANGED BY", (of_engine() - before).abs().max().item())
    print("DIFFERS BY", (of_engine() - of_policy).abs().max().item())
    print("TABLE FILL", llm.collective_rpc("draft_statistics")[0]["table_fill"])
"""
ROUNDING = 1e-3  # of log-probabilities, by kernels of vLLM and of transformers

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not (TRL / ".installed").is_file(), reason="needs `make trl`"),
]


def environment() -> dict[str, str]:
    paths = os.pathsep.join(map(str, [TRL, VLLM, ROOT]))
    return os.environ | {"PYTHONPATH": paths, "VLLM_LOGGING_LEVEL": "INFO"}


def train(*arguments: str) -> str:
    settings = [f"--model={TARGET}", "--epochs=1", "--prompts=2", "--batch=1", "--samples=4"]
    done = subprocess.run(
        [sys.executable, *arguments, *settings, "--max-tokens=32"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize("method", ["token_recycling", "none"])
def test_each_step_says_what_was_drafted(method):
    output = train(str(EXAMPLES / "trl_grpo.py"), f"--method={method}")
    steps = [line for line in output.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in steps] == ["step 1", "step 2"]
    rates = [float(line.split()[2]) for line in steps]
    assert (max(rates) > 1.0) == (method != "none")
    assert ("VLLM_RECYCLE turns speculation on" in output) == (method != "none")


def test_the_engine_has_the_weights_that_were_trained():
    output = train("-c", SCRIPT, str(EXAMPLES), "--learning-rate=0.003")
    found = dict(re.findall(r"^([A-Z]+ [A-Z]+) (\S+)$", output, re.MULTILINE))
    assert float(found["CHANGED BY"]) > 100 * ROUNDING
    assert float(found["DIFFERS BY"]) < ROUNDING
    assert float(found["TABLE FILL"]) > 0


def test_the_server_that_trl_starts_drafts(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "trl.cli.main", "vllm-serve", "--host", "127.0.0.1"]
    command += ["--port", url.rpartition(":")[2], "--model", TARGET, "--dtype", "float32"]
    command += ["--max_model_len", "512", "--enforce_eager", "true"]
    command += ["--speculative_config", '{"method": "token_recycling"}']
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            env=environment() | {"VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: server.poll() is not None or "startup complete" in log.read_text(), 300)
        body = {"model": TARGET, "prompt": "import os\n\n\nclass Config:", "max_tokens": 48}
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body | {"temperature": 0}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 48
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
        [drafts] = re.findall(r"^vllm:spec_decode_num_drafts_total.* (\S+)$", metrics, re.MULTILINE)
        assert float(drafts) > 0
    except OSError as error:
        raise AssertionError(log.read_text()[-4000:]) from error
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
