"""An environment whose vLLM we do not support: nothing changes for who does not use our methods."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs

from tests.integration.engines import TARGET, make_config
from vllm_recycle.integration.plugin import register
from vllm_recycle.integration.start import versions
from vllm_recycle.integration.start.versions import SUPPORTED_VLLM

# All cases are children of one process, which imports what they need and loads no plugin. In the
# first case a configuration comes from elsewhere.
CASES = """
import os, pickle, sys
import vllm
from vllm import plugins
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
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
    said = []
    if os.path.exists(case):
        spec = pickle.load(open(case, "rb")).speculative_config
        SamplingParams(min_p=0.1, logit_bias={3: 1.0})._validate_spec_decode(spec)
        try:
            SamplingParams(extra_args={"speculate": "perhaps"})._validate_spec_decode(spec)
        except VLLMValidationError as error:
            said.append(error)
    else:
        if case == "replaced":
            del SamplingParams._validate_spec_decode
        elif case == "imported":
            del utils.validate_and_normalize_dynamic_sd_schedule
        else:
            vllm.__version__ = case
        said += [method_of(), method_of({"method": "ngram", "num_speculative_tokens": 2})]
        for name in ("token_recycling", "ouroboros"):
            try:
                method_of({"method": name, "model": sys.argv[1]})
            except RuntimeError as error:
                said.append(error)
    print("", case, *said, sep="|", flush=True)
    os._exit(0)
"""
UNSUPPORTED = "0.34.1"
OURS = f"vllm_recycle does not run in vllm {vllm.__version__}: "
REASONS = {
    UNSUPPORTED: f"vllm_recycle supports vllm {SUPPORTED_VLLM}, found {UNSUPPORTED}; set "
    "VLLM_RECYCLE_ALLOW_UNTESTED_VLLM=1 to try it, untested",
    "replaced": f"{OURS}AttributeError(",
    "imported": f"{OURS}ImportError(",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> tuple[list[list[str]], str]:
    """What each case says, and all that was printed."""
    path = tmp_path_factory.mktemp("elsewhere") / "config"
    path.write_bytes(pickle.dumps(make_config()))
    command = [sys.executable, "-c", CASES, TARGET, str(path), *REASONS]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line.split("|")[1:] for line in result.stdout.splitlines() if line.startswith("|")]
    return lines, result.stdout + result.stderr


def test_only_our_methods_are_refused_and_once_a_warning_says_so(said):
    (_, *cases), output = said
    assert [case for case, *_ in cases] == [*REASONS]
    for case, plain, ngram, *refused in cases:
        assert (plain, ngram) == ("None", "ngram")
        assert [message.startswith(REASONS[case]) for message in refused] == [True] * 2
    assert output.count("are refused, all else runs as without them") == len(REASONS)


def test_a_configuration_judges_requests_in_a_process_where_none_was_made(said):
    """As Ray Serve has it on GPUs."""
    ((_, message), *_), _ = said
    assert "'speculate' is 'perhaps', expected true or false" in message


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [
        *((version, True) for version in ("0.30.0", "0.32.1rc2", "0.33.3.dev7+g12ab.cpu")),
        *((version, False) for version in ("0.29.2", "0.34.0", "0.35.0rc1+cu130", "dev")),
    ],
)
def test_a_version_that_is_not_supported_must_be_asked_for(version, is_supported, monkeypatch):
    monkeypatch.setattr(versions.vllm, "__version__", version)
    message = f"supports vllm {SUPPORTED_VLLM}, found {version}; set VLLM_RECYCLE_ALLOW_UNTESTED"
    with nullcontext() if is_supported else pytest.raises(RuntimeError, match=re.escape(message)):
        versions.check_vllm_version()
    monkeypatch.setenv("VLLM_RECYCLE_ALLOW_UNTESTED_VLLM", "1")
    versions.check_vllm_version()


def test_registering_again_changes_nothing():
    register()
    before = EngineArgs.create_engine_config
    register()
    assert EngineArgs.create_engine_config is before
