"""The modules of a GPU step do nothing that waits for the device or loops over requests.

`test_runner` sees the same at run time; this is about lines that its steps do not reach.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "vllm_recycle"
MODULES = [
    *sorted(PACKAGE.glob("kernels/triton/**/*.py")),
    *(
        PACKAGE / "core" / "paper" / f"{name}.py"
        for name in ("harvest", "ouroboros", "phrase_pool")
    ),
    PACKAGE / "integration" / "cuda" / "along_trunks.py",
    PACKAGE / "integration" / "cuda" / "hosted_trunk.py",
    PACKAGE / "integration" / "cuda" / "runner.py",
    *sorted(PACKAGE.glob("integration/cuda/ouroboros/*.py")),
    PACKAGE / "integration" / "cuda" / "sampling.py",
    PACKAGE / "integration" / "cuda" / "backend.py",
]
# Methods that read a tensor's values on the host, or whose result has as many rows as they say.
WAITING = {"item", "tolist", "cpu", "nonzero", "masked_select", "unique", "synchronize"}
# Where a loop over requests is due: when they begin, get blocks or end, and when the engine begins.
NOT_IN_A_STEP = {"add_requests", "begin", "follow", "release"}


def complaints(source: str) -> list[str]:
    """What a module does that it should not, as `function: what`."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Attribute(attr=name)) if name in WAITING:
                    found.append(f"{function.name}: {name}")
                case ast.For(iter=iterated) | ast.comprehension(iter=iterated):
                    looped = ast.unparse(iterated)
                    over_requests = "req" in looped and function.name not in NOT_IN_A_STEP
                    if over_requests and not looped.startswith("_iter_request_chunks("):
                        found.append(f"{function.name}: loop over {looped}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_nothing_waits_and_nothing_loops_over_requests(path):
    assert complaints(path.read_text(encoding="utf-8")) == []


def test_lines_that_do_are_seen():
    lines = ["x.item()", "y = x.cpu()", "x[x.nonzero()]", "for r in batch.req_ids: pass"]
    lines += ["[r for r in range(num_reqs)]"]
    assert [len(complaints(f"def step(x):\n    {line}\n")) for line in lines] == [1] * 5
