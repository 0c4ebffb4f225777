"""TRL's trainer with engines that the environment turns the method on for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.engines import EXAMPLES, TARGET

ROOT = Path(__file__).parents[2]
TRL, VLLM = ROOT / ".venv/trl", ROOT / ".venv/vllm-0.31.0"
# Trains with a rate that moves the weights, and lets trainer and engine answer once more.
SCRIPT = """
import sys, tempfile
sys.path.insert(0, sys.argv.pop(1))
from rollouts import make_parser
from trl_grpo import make_trainer
from vllm import SamplingParams
with tempfile.TemporaryDirectory() as folder:
    trainer = make_trainer(make_parser("").parse_args(), folder)
    llm = trainer.vllm_generation.llm
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompt = "Question: A baker makes 3 trays of 12 rolls.\\nAnswer:"
    def answer():
        return [*llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids]
    before = answer()
    trainer.train()
    trainer.vllm_generation.sync_weights()
    inputs = trainer.processing_class(prompt, return_tensors="pt")
    policy = trainer.model.eval().generate(
        **inputs, max_new_tokens=24, min_new_tokens=24, do_sample=False
    )[0, inputs.input_ids.shape[1]:].tolist()
    print("ENGINE", "changed" if answer() != before else "same", answer() == policy)
    print("STATISTICS", llm.collective_rpc("draft_statistics")[0]["table_fill"] > 0)
"""

# Asks `check` about what `trl vllm-serve` would run.
SERVE = """
import sys
from trl.scripts.vllm_serve import ScriptArguments, build_command
from vllm_recycle.cli import main
config = '{"method": "token_recycling"}'
command = build_command(ScriptArguments(sys.argv[1], speculative_config=config))
sys.exit(main(["check", *command[command.index("serve") + 1:], "--max-num-seqs=8"]))
"""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not (TRL / ".installed").is_file(), reason="needs `make trl`"),
]


def train(*arguments: str) -> str:
    settings = [f"--model={TARGET}", "--epochs=1", "--prompts=2", "--batch=1", "--samples=4"]
    return run(*arguments, *settings, "--max-tokens=32")


def run(*arguments: str) -> str:
    paths = os.pathsep.join(map(str, [TRL, VLLM, ROOT]))
    given = {"PYTHONPATH": paths, "VLLM_LOGGING_LEVEL": "INFO"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | given,
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


def test_the_engine_answers_with_the_weights_that_were_trained():
    output = train("-c", SCRIPT, str(EXAMPLES), "--learning-rate=0.003")
    assert "ENGINE changed True" in output
    assert "STATISTICS True" in output


def test_the_server_that_trl_starts_is_supported():
    assert f"{TARGET} with token_recycling" in run("-c", SERVE, TARGET)
