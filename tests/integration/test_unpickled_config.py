"""A configuration that is used in a process where none was made, as Ray Serve does on GPUs."""

from __future__ import annotations

import pickle
import subprocess
import sys

from engines import TARGET, TOKEN_RECYCLING
from vllm.engine.arg_utils import EngineArgs

from vllm_recycle.integration.plugin import register

ELSEWHERE = """
import pickle, sys
from pathlib import Path
config = pickle.loads(Path(sys.argv[1]).read_bytes())

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

SamplingParams(min_p=0.1, logit_bias={3: 1.0})._validate_spec_decode(config.speculative_config)
try:
    params = SamplingParams(extra_args={"speculate": "perhaps"})
    params._validate_spec_decode(config.speculative_config)
except VLLMValidationError as error:
    print(error)
"""


def test_it_brings_along_what_judges_requests(tmp_path):
    register()
    args = EngineArgs(TARGET, dtype="float32", speculative_config=TOKEN_RECYCLING)
    path = tmp_path / "config"
    path.write_bytes(pickle.dumps(args.create_engine_config()))
    command = [sys.executable, "-c", ELSEWHERE, str(path)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "'speculate' is 'perhaps', expected true or false" in found.stdout
