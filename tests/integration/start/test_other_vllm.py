"""An environment whose vLLM we do not support: nothing changes for who does not use our methods."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs

from tests.integration.engines import TARGET
from vllm_recycle.integration import versions
from vllm_recycle.integration.plugin import register
from vllm_recycle.integration.versions import SUPPORTED_VLLM

# All cases are children of one process, which imports what they need and loads no plugin.
CASES = """
import os, sys
import vllm
from vllm import plugins
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.spec_decode.dynamic import utils

def method_of(config=None):
    args = EngineArgs(sys.argv[1], dtype="float32", speculative_config=config)
    spec = args.create_engine_config().speculative_config
    return spec and spec.method

plugins.plugins_loaded = True
method_of()
plugins.plugins_loaded = False

for case in sys.argv[2:]:
    if os.fork():
        os.wait()
        continue
    if case == "replaced":
        del SamplingParams._validate_spec_decode
    elif case == "imported":
        del utils.validate_and_normalize_dynamic_sd_schedule
    else:
        vllm.__version__ = case
    said = [method_of(), method_of({"method": "ngram", "num_speculative_tokens": 2})]
    for name in ("token_recycling", "ouroboros"):
        try:
            method_of({"method": name, "model": sys.argv[1]})
        except RuntimeError as error:
            said.append(str(error))
    print("", case, *said, sep="|", flush=True)
    os._exit(0)
"""
VERSIONS = ("0.34.1", "dev", "0.35.0rc1+cu130")


def test_only_our_methods_are_refused_and_once_a_warning_says_so():
    command = [sys.executable, "-c", CASES, TARGET, *VERSIONS, "replaced", "imported"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    output = result.stdout + result.stderr
    said = [line.split("|")[1:] for line in result.stdout.splitlines() if line.startswith("|")]
    reasons = {
        **{
            version: f"vllm_recycle supports vllm {SUPPORTED_VLLM}, found {version}; set "
            "VLLM_RECYCLE_ALLOW_UNTESTED_VLLM=1 to try it, untested"
            for version in VERSIONS
        },
        "replaced": f"vllm_recycle does not run in vllm {vllm.__version__}: AttributeError(",
        "imported": f"vllm_recycle does not run in vllm {vllm.__version__}: ImportError(",
    }
    assert [case for case, *_ in said] == list(reasons)
    for case, plain, ngram, *refused in said:
        assert (plain, ngram) == ("None", "ngram")
        assert len(refused) == 2
        assert all(message.startswith(reasons[case]) for message in refused)
    warnings = re.findall("are refused, all else runs as without them", output)
    assert len(warnings) == len(reasons)


@pytest.mark.parametrize("version", ["0.30.0", "0.32.1rc2", "0.33.3.dev7+g12ab.cpu"])
def test_versions_that_are_supported(version, monkeypatch):
    monkeypatch.setattr(versions.vllm, "__version__", version)
    versions.check_vllm_version()


@pytest.mark.parametrize("version", ["0.29.2", "0.34.0", "0.35.0rc1+cu130", "dev"])
def test_a_version_that_is_not_supported_must_be_asked_for(version, monkeypatch):
    monkeypatch.setattr(versions.vllm, "__version__", version)
    message = f"supports vllm {SUPPORTED_VLLM}, found {version}; set VLLM_RECYCLE_ALLOW_UNTESTED"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        versions.check_vllm_version()
    monkeypatch.setenv("VLLM_RECYCLE_ALLOW_UNTESTED_VLLM", "1")
    versions.check_vllm_version()


def test_registering_again_changes_nothing():
    register()
    before = EngineArgs.create_engine_config
    register()
    assert EngineArgs.create_engine_config is before
