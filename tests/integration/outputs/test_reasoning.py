"""Requests that reason: no drafts ahead of a grammar, and budgets of tokens to think with."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.engines import GROWN, THINKING, core, counter, engine, generate, read_prompts


class UntilEqualsSign(BaseThinkingReasoningParser):
    """What comes before the first equals sign of a text is reasoning."""

    start_token, end_token = "<", "Ġ="


def test_there_are_no_drafts_before_a_request_has_reasoned(monkeypatch):
    ReasoningParserManager.register_module("until_equals_sign", module=UntilEqualsSign, force=True)
    settings = {"reasoning_parser": "until_equals_sign"}
    prompts = read_prompts(1) * 2
    grammar = StructuredOutputsParams(regex=r" \d+ (apples|dollars|miles)\.")
    params = SamplingParams(temperature=0, max_tokens=48, structured_outputs=grammar)
    with engine(**settings) as llm:
        plain = generate(llm, prompts, params)
    with engine(GROWN, **settings) as llm:
        generate(llm, prompts, params)
        scheduler, seen = core(llm).scheduler, []
        schedule = scheduler.schedule

        def watching(*args: Any, **kwargs: Any) -> Any:
            step = schedule(*args, **kwargs)
            for name in step.num_scheduled_tokens:
                reasoned = scheduler.requests[name].structured_output_request.reasoning_ended
                seen.append((bool(reasoned), name in step.scheduled_spec_decode_tokens))
            return step

        monkeypatch.setattr(scheduler, "schedule", watching)
        assert generate(llm, prompts, params) == plain
    assert {(False, False), (True, True)} <= set(seen)
    assert (False, True) not in seen


def test_budgets_of_tokens_to_think_with():
    prompts = [f"{prompt} Question" for prompt in read_prompts(6, max_words=60)]

    def params(budgets: list[int | None]) -> list[SamplingParams]:
        given = {"max_tokens": 40, "ignore_eos": True}
        return [
            SamplingParams(temperature=i % 2, seed=i, thinking_token_budget=budget, **given)
            for i, budget in enumerate(budgets)
        ]

    budgets = [None, 0, 1, 3, 7, 12]
    with engine(**THINKING) as llm:
        free = generate(llm, prompts, params([None] * 6))
        expected = generate(llm, prompts, params(budgets))
    assert [a == b for a, b in zip(free, expected, strict=True)] == [True, *[False] * 5]
    with engine(GROWN, **THINKING) as llm:
        assert generate(llm, prompts, params(budgets)) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
