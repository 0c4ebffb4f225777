"""What is to be copied to run a server: images, values of a Helm chart, rules of Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.integration.engines import EXAMPLES, TARGET, TRUNK
from vllm_recycle.cli import main
from vllm_recycle.integration.start.versions import SUPPORTED_VLLM

IMAGES = {"cpu": "vllm/vllm-openai-cpu", "cuda": "vllm/vllm-openai"}


def image_arguments(device: str, *flags: str) -> list[str]:
    """What the command of an image gives `vllm serve`, of a model and flags."""
    text = (EXAMPLES / "docker" / f"Dockerfile.{device}").read_text()
    [entry_point] = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    shell, option, script, *rest = json.loads(entry_point)
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
    method = {"method": "ouroboros", "model": TRUNK["model"]}
    given = image_arguments(device, "--speculative-config", json.dumps(method))
    assert main(["check", *given]) == 0
    assert "with ouroboros" in capsys.readouterr().out


@pytest.mark.parametrize("device", IMAGES)
def test_images_have_vllm_as_it_is_supported_and_copy_what_is_there(device):
    text = (EXAMPLES / "docker" / f"Dockerfile.{device}").read_text()
    [version] = re.findall(rf"^FROM {IMAGES[device]}:v(\S+)$", text, re.MULTILINE)
    assert SpecifierSet(SUPPORTED_VLLM).contains(version)
    for names in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((EXAMPLES.parent / name).exists() for name in names.split())


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
    time = "request_time_per_output_token_seconds"
    grows = {  # in a minute
        ("spec_decode_num_drafts_total", "tree"): 60,
        ("spec_decode_num_accepted_tokens_total", "tree"): num_accepted,
        ("recycle_request_accepted_tokens_per_step_count", "tree"): 9,
        (f"{time}_sum", "tree"): seconds,
        (f"{time}_count", "tree"): 9,
        (f"{time}_sum", "plain"): 4,
        (f"{time}_count", "plain"): 9,
    }
    labels = '{{model_name="m", instance="{}"}}'
    series = [
        {"series": f"vllm:{name}{labels.format(instance)}", "values": f"0+{rate}x60"}
        for (name, instance), rate in grows.items()
    ]
    # It expects none of both alerts, and names those that are there all the same.
    names = ("DraftsDoNotPay", "SlowerThanPlain")
    alerts = [{"alertname": name, "eval_time": "45m"} for name in names]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": alerts}
    rules = {"rule_files": [str(EXAMPLES / "alerts.yaml")], "evaluation_interval": "1m"}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(rules | {"tests": [test]}))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yaml")]
    run = subprocess.run(command, capture_output=True, text=True)
    output = run.stdout + run.stderr
    assert re.findall(r"alertname: (\w+), time: 45m", output) == expected, output
    assert (run.returncode == 0) == (not expected), output
