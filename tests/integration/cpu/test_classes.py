"""Acceptance is counted apart for greedy requests and for those that sample, in one batch."""

from __future__ import annotations

from vllm import SamplingParams

from tests.integration.engines import GROWN, engine, generate, read_prompts, runner
from vllm_recycle.core.adjacency import GREEDY, SAMPLED

PROMPTS = read_prompts(2)


def test_the_class_of_a_request_is_that_of_its_temperature():
    with engine(GROWN) as llm:
        counts = runner(llm).tree_drafter.state.acceptance.counts
        for temperatures in ((0.0, 0.0), (0.7, 1.0), (0.0, 0.9)):
            params = [SamplingParams(temperature=t, seed=1, max_tokens=12) for t in temperatures]
            before = counts.clone()
            generate(llm, PROMPTS, params)
            changed = {of for of in (GREEDY, SAMPLED) if (counts != before)[of].any()}
            assert changed == {SAMPLED if t else GREEDY for t in temperatures}
