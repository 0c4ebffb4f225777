"""Trees grow along copies of a request's own text and of its hint; outputs tell nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.integration.cuda.v2_engines import IS_V2, LLM_ARGUMENTS, TEXT, with_sizes
from tests.integration.cuda.v2_scripts import run_script
from tests.integration.engines import (
    GROWN,
    PAPER,
    TARGET,
    TOKEN_RECYCLING,
    engine,
    generate,
    runner,
)
from tests.integration.models.derived_models import qwen2_audio

# Texts that repeat themselves, so that outputs do.
PROMPTS = [TEXT, TEXT.split("\n\n", 1)[1]]
WAYS = [{"temperature": 0}, {"temperature": 0.9, "seed": 5}]
LENGTH = 12 if IS_V2 else 30  # the interpreter is slow
METHOD = with_sizes({**TOKEN_RECYCLING, "max_nodes": 8, "context_mib": 1}, [(1, 4, 8)])
ARGUMENTS = {**LLM_ARGUMENTS, "model": TARGET, "max_model_len": 192} if IS_V2 else {}
METHODS = {
    "none": None,
    "sequence": METHOD if IS_V2 else GROWN,
    "isolated": {**(METHOD if IS_V2 else GROWN), "scope": "isolated"},
    **({} if IS_V2 else {"template": PAPER}),
}


def serve(method: Any) -> dict[str, Any]:
    """What requests get, how often copies were right, and how often they were looked at."""
    with engine(method, **ARGUMENTS) as llm:
        ways = [SamplingParams(**way, max_tokens=LENGTH, ignore_eos=True) for way in WAYS]
        outputs = generate(llm, PROMPTS, ways)
        copies = None if method is None else runner(llm).tree_drafter.copies
        counts = None if copies is None else copies.acceptance.counts.sum((0, 1, 2)).tolist()
    return {"outputs": [[[*text] for text in texts] for texts in outputs], "counts": counts}


@pytest.fixture(scope="module", params=["V1", pytest.param("V2", marks=pytest.mark.slow)])
def served(request, tmp_path_factory) -> dict[str, dict[str, Any]]:
    if request.param == "V1":
        return main(Path())
    return run_script(request.path, tmp_path_factory.mktemp("v2"))


def test_outputs_are_plain_ones_and_copies_are_counted_unless_isolated(served):
    assert all(found["outputs"] == served["none"]["outputs"] for found in served.values())
    right, seen = served["sequence"]["counts"]
    assert 0 < right <= seen
    assert served["isolated"]["counts"] == [0, 0]
    assert served.get("template", {"counts": None})["counts"] is None


@pytest.mark.parametrize("language_model_only", [True, False])
def test_engines_that_read_text_alone_have_copies(language_model_only, tmp_path):
    model = qwen2_audio(tmp_path / "model", hears=not language_model_only)
    with engine(GROWN, model=model, language_model_only=language_model_only) as llm:
        assert (runner(llm).tree_drafter.copies is not None) == language_model_only


def main(_: Path) -> dict[str, dict[str, Any]]:
    """Also in a process with Model Runner V2."""
    return {name: serve(method) for name, method in METHODS.items()}
