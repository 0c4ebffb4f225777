"""Hints of requests and texts for all of them, on Model Runner V2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import core, counter, engine, runner, watch_steps
from v2_engines import GREEDY, GROWN, LLM_ARGUMENTS, SEEDED, TEXT, Waits, generate

pytestmark = pytest.mark.slow

PARAMS = ({**GREEDY, "max_tokens": 16}, {**SEEDED, "max_tokens": 16, "logprobs": None})
REQUESTS = [((0, 16), PARAMS[0]), ((3, 60), PARAMS[1])]
CROWDED = [((i, i + 61), {**GREEDY, "max_tokens": 20}) for i in range(4)]
KINDS = ["no hints", "answers", "wrong answers"]
ISOLATED = {**GROWN, "scope": "isolated"}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_those_without_hints(kind, result):
    assert result[kind]["tokens"] == result["plain"]


def test_right_hints_make_it_fewer_steps(result):
    assert result["answers"]["steps"] < 0.7 * result["no hints"]["steps"]


def test_texts_that_are_learnt_make_it_fewer_steps(result):
    learnt, cold = result["learnt texts"], result["shared, cold"]
    assert learnt["tokens"] == cold["tokens"] == result["plain"]
    assert learnt["steps"] < 0.7 * cold["steps"]
    assert learnt["taken in"] == [learnt["given"]]


def test_a_preempted_request_has_its_hint_again(result):
    crowded = result["crowded"]
    assert crowded["tokens"] == crowded["plain"]
    assert crowded["preemptions"] > 0
    assert crowded["taken in"] == len(CROWDED) + crowded["preemptions"]


def test_nothing_waits_for_the_device(result):
    assert result["waits"] == []


def with_hints(requests: Any, hints: Any) -> Any:
    pairs = zip(requests, hints, strict=True)
    return [(at, {**params, "extra_args": {"hint": hint}}) for (at, params), hint in pairs]


def served(llm: Any, requests: Any) -> dict[str, Any]:
    """In the process with the engines: token ids, and how many rows of requests it took."""
    steps = watch_steps(llm)
    tokens = [output["token_ids"] for output in generate(llm, [requests])]
    return {"tokens": tokens, "steps": sum(len(step.num_scheduled_tokens) for step in steps)}


def serve_crowded() -> dict[str, Any]:
    """In the process with the engines: too few KV blocks for all requests, which have hints.

    All prompts are in the first step, and the hints are wrong, so that nobody is done early.
    """
    arguments = {**LLM_ARGUMENTS, "max_num_batched_tokens": 256}
    with engine(**arguments) as llm:
        plain = served(llm, CROWDED)["tokens"]
    with engine(GROWN, **arguments) as llm:
        drafter, taken_in = runner(llm).tree_drafter, []
        take_in = drafter.take_in
        drafter.take_in = lambda *args: (taken_in.append(args), take_in(*args))
        found = served(llm, with_hints(CROWDED, plain[1:] + plain[:1]))
        found["preemptions"] = counter(llm, "num_preemptions")
    return {**found, "plain": plain, "taken in": len(taken_in)}


def main(_: Path) -> dict[str, Any]:
    """In the process with the engines."""
    waits = Waits()
    with engine(**LLM_ARGUMENTS) as llm:
        plain = served(llm, REQUESTS)["tokens"]
        token_ids = llm.get_tokenizer().encode(TEXT)
    result: dict[str, Any] = {"plain": plain, "crowded": serve_crowded()}
    with engine(ISOLATED, **LLM_ARGUMENTS) as llm:
        waits.watch(runner(llm), "add_requests")
        for kind, hints in zip(KINDS, (None, plain, plain[::-1]), strict=True):
            requests = REQUESTS if hints is None else with_hints(REQUESTS, hints)
            result[kind] = served(llm, requests)
    with engine(GROWN, **LLM_ARGUMENTS) as llm:
        result["shared, cold"] = served(llm, REQUESTS)
        runner(llm).tree_drafter.reset()
        texts = [
            token_ids[slice(*at)] + answer for (at, _), answer in zip(REQUESTS, plain, strict=True)
        ]
        taken_in = core(llm).collective_rpc("learn_texts", args=(texts,))
        learnt = {"taken in": taken_in, "given": sum(map(len, texts))}
        result["learnt texts"] = served(llm, REQUESTS) | learnt
    return result | {"waits": waits.seen}
