"""The engines of tests that are of both of vLLM's model runners."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.cuda.v2_scripts import run_script
from tests.integration.engines import HEAD
from tests.integration.models import heads


@pytest.fixture(scope="session", autouse=True)
def head() -> Iterator[None]:
    """The head of `HOSTED` is there while tests run."""
    heads.eagle(HEAD)
    yield
    shutil.rmtree(HEAD.parent)


@pytest.fixture(scope="module", params=["V1", pytest.param("V2", marks=pytest.mark.slow)])
def served(request, tmp_path_factory) -> dict[str, Any]:
    """The result of the test file's `main`, once for each of vLLM's model runners.

    With V1 it is called in this process, with V2 in another one, see `v2_scripts`.
    """
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "V2":
        return run_script(request.path, folder)
    return json.loads(json.dumps(request.module.main(folder)))
