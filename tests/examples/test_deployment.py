"""What is to be copied to run a server: images, values of a Helm chart, rules of Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_recycle.cli import main
from vllm_recycle.integration.versions import SUPPORTED_VLLM

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
IMAGES = {"cpu": "vllm/vllm-openai-cpu", "cuda": "vllm/vllm-openai"}
TARGET = str(EXAMPLES / "models" / "target")


def image_arguments(device: str, *flags: str) -> list[str]:
    """What the command of an image gives `vllm serve`, of a model and flags."""
    text = (EXAMPLES / "docker" / f"Dockerfile.{device}").read_text()
    shell, option, script, *rest = json.loads(
        re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0]
    )
    assert "exec vllm serve" in script
    script = script.replace("exec vllm serve", "printf '%s\\n'")
    command = [shell, option, script, *rest, TARGET, "--served-model-name", "a b", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def chart_arguments(_: str) -> list[str]:
    """What the values of the chart give it, which makes flags of some."""
    values = yaml.safe_load((EXAMPLES / "helm" / "values.yaml").read_text())
    [model] = values["servingEngineSpec"]["modelSpec"]
    config = model["vllmConfig"]
    flags = [f"--dtype={config['dtype']}", f"--max-model-len={config['maxModelLen']}"]
    flags += ["--enable-prefix-caching"] * config["enablePrefixCaching"]
    return [TARGET, *flags, *config["extraArgs"]]


@pytest.mark.parametrize(
    ("arguments", "device"),
    [(image_arguments, "cpu"), (image_arguments, "cuda"), (chart_arguments, "")],
)
def test_their_arguments_turn_the_method_on(arguments, device, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # the chart's model has more
    given = arguments(device)
    assert given[0] == TARGET  # where vLLM expects the model
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    assert args.speculative_config == {"method": "token_recycling"}
    assert args.served_model_name == (["a b"] if device else None)
    status = main(["check", TARGET, "--dtype=float32", "--max-num-seqs=2", *given[1:]])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("device", IMAGES)
def test_a_method_that_an_image_is_given_replaces_ours(device, capsys):
    method = {"method": "ouroboros", "model": str(EXAMPLES / "models" / "draft")}
    given = image_arguments(device, "--speculative-config", json.dumps(method))
    assert main(["check", *given]) == 0
    assert "with ouroboros" in capsys.readouterr().out


@pytest.mark.parametrize("device", IMAGES)
def test_images_have_vllm_as_it_is_supported_and_copy_what_is_there(device):
    text = (EXAMPLES / "docker" / f"Dockerfile.{device}").read_text()
    [version] = re.findall(rf"^FROM {IMAGES[device]}:v(\S+)$", text, re.MULTILINE)
    assert SpecifierSet(SUPPORTED_VLLM).contains(version)
    for names in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in names.split())


RULES = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: '{drafts}{{model_name="m", instance="tree"}}', values: 0+60x60}}
      - {{series: '{accepted}{{model_name="m", instance="tree"}}', values: 0+{num_accepted}x60}}
      - {{series: '{requests}{{model_name="m", instance="tree"}}', values: 0+9x60}}
      - {{series: '{time}_sum{{model_name="m", instance="tree"}}', values: 0+{seconds}x60}}
      - {{series: '{time}_count{{model_name="m", instance="tree"}}', values: 0+9x60}}
      - {{series: '{time}_sum{{model_name="m", instance="plain"}}', values: 0+4x60}}
      - {{series: '{time}_count{{model_name="m", instance="plain"}}', values: 0+9x60}}
    alert_rule_test:
      - {{alertname: DraftsDoNotPay, eval_time: 45m}}
      - {{alertname: SlowerThanPlain, eval_time: 45m}}
"""


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool, of Prometheus")
@pytest.mark.parametrize(
    ("num_accepted", "seconds", "expected"),
    [
        (50, 3, []),
        (3, 3, ["DraftsDoNotPay"]),
        (50, 5, ["SlowerThanPlain"]),
        (0, 5, ["DraftsDoNotPay", "SlowerThanPlain"]),
    ],
)
def test_alerts_fire_when_they_should(num_accepted, seconds, expected, tmp_path):
    test = RULES.format(
        rules=EXAMPLES / "alerts.yaml",
        drafts="vllm:spec_decode_num_drafts_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
        requests="vllm:recycle_request_accepted_tokens_per_step_count",
        time="vllm:request_time_per_output_token_seconds",
        num_accepted=num_accepted,
        seconds=seconds,
    )
    (tmp_path / "test.yaml").write_text(test)
    command = ["promtool", "test", "rules", str(tmp_path / "test.yaml")]
    run = subprocess.run(command, capture_output=True, text=True)
    output = run.stdout + run.stderr
    # It expects none of both alerts, and names those that are there all the same.
    assert re.findall(r"alertname: (\w+), time: 45m", output) == expected, output
    assert (run.returncode == 0) == (not expected), output
