"""Grammars that the worker compiles once more, in the background."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.engines import GROWN, counter, engine, generate
from tests.integration.outputs.test_structured_output import GREEDY, JSON
from vllm_recycle.integration.cpu.grammar_ahead import GrammarsAhead, use_all_cores


def test_drafts_grow_without_a_grammar_that_the_worker_cannot_compile(monkeypatch):
    text, grammar = JSON
    params = SamplingParams(**GREEDY, structured_outputs=StructuredOutputsParams(**grammar))
    with engine() as llm:
        plain = generate(llm, [text], params)

    def fail(*_: Any) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr(GrammarsAhead, "_compile", fail)
    with engine(GROWN) as llm:
        assert generate(llm, [text, text], params) == plain * 2
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no cores to be bound to")
def test_grammars_are_compiled_on_any_core():
    allowed = os.sched_getaffinity(0)

    def bound() -> set[int]:
        os.sched_setaffinity(0, {min(allowed)})
        use_all_cores()
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(bound).result() >= allowed
