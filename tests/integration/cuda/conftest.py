"""What tests with engines of Model Runner V2 share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.cuda.v2_scripts import run_script
from vllm_recycle.integration.start.versions import FEATURES

# Files that import what drafts by models or by vLLM's speculators.
WITH_HOSTS = ["compiled_once", "draft_cache", "hosted_trunks", "ouroboros", "ranks", "sleep"]
collect_ignore = [] if FEATURES.v2_hosts else [f"test_{name}.py" for name in WITH_HOSTS]
if torch.cuda.is_available():
    # The others run in Triton's interpreter, with vLLM's workers for CPUs. When these are imported,
    # they put placeholders in the place of CUDA's events.
    files = Path(__file__).parent.glob("test_*.py")
    collect_ignore += [file.name for file in files if file.name != "test_gpu.py"]


@pytest.fixture(scope="module")
def result(request, tmp_path_factory) -> dict[str, Any]:
    """What `main` of the test file returns, in a process with Model Runner V2."""
    return run_script(request.path, tmp_path_factory.mktemp("v2"))
