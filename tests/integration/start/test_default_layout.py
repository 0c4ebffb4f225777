"""Engines as `LLM(...)` and `vllm serve` lay them out: the scheduler and the worker are processes.

Other tests have both in their own process, to look inside. What drafts gain must be the same.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.engines import GROWN, counter, engine, generate, use_two_ranks
from tests.integration.outputs.test_structured_output import GREEDY, KINDS, PLAIN, SEEDED, UNSEEN

LONG = {"max_tokens": 60}
# Whose drafts wait for grammars, however busy this machine is.
WAITING = {**GROWN, "scope": "isolated"}


def serve(backend: str, method: Any = WAITING, **layout: Any) -> tuple[list[Any], float]:
    """What requests get, and tokens a step of those that follow what none did before.

    What their drafts are is what the grammar tells.
    """
    before = [StructuredOutputsParams(**grammar) for _, grammar in KINDS[backend]]
    unseen = StructuredOutputsParams(regex=UNSEEN)
    with engine(method, structured_outputs_config={"backend": backend}, **layout) as llm:
        # Others first: with these the worker gets its compiler.
        params = [SamplingParams(**GREEDY, structured_outputs=one) for one in before]
        outputs = generate(llm, [text for text, _ in KINDS[backend]], params)
        count = counter(llm, "spec_decode_num_accepted_tokens")
        ways = [SamplingParams(**way | LONG, structured_outputs=unseen) for way in (GREEDY, SEEDED)]
        ours = generate(llm, PLAIN, ways)
        accepted = counter(llm, "spec_decode_num_accepted_tokens") - count
        tokens = sum(len(text) for (text,) in ours)
        return outputs + ours, tokens / (tokens - accepted)


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("guidance", 1),
        pytest.param("xgrammar", 2, marks=[
            pytest.mark.slow,
            pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores"),
        ]),
    ],
)  # fmt: skip
def test_drafts_grow_with_grammars_wherever_the_worker_is(backend, ranks, monkeypatch):
    plain, _ = serve(backend, None)
    here, tokens_here = serve(backend)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    if ranks > 1:
        use_two_ranks(monkeypatch)
    there, tokens_there = serve(backend, tensor_parallel_size=ranks)
    assert here == there == plain
    assert tokens_here > 1.5
    assert tokens_there > 0.9 * tokens_here
