"""What tests with engines of Model Runner V2 share."""

from __future__ import annotations

from typing import Any

import pytest
from v2_scripts import run_script


@pytest.fixture(scope="module")
def result(request, tmp_path_factory) -> dict[str, Any]:
    """What `main` of the test file returns, in a process with Model Runner V2."""
    return run_script(request.path, tmp_path_factory.mktemp("v2"))
