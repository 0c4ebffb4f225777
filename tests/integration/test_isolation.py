"""Under `isolated` nothing of a request's drafts tells of its neighbours: found by attacking it.

A request decodes beside others that repeat themselves, whose drafts are long and accepted, and
beside as many that do not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from engines import GROWN, PAPER, TRUNK, core, engine, generate, read_prompts, with_hint
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

NUM_NEIGHBOURS = 3
PROBE = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@dataclass(frozen=True)
class Attack:
    """Where something is scarce.

    Attributes:
        method: that is attacked.
        settings: of the engine.
        lengths: of the neighbours' prompts, of those that repeat themselves and the others.
        they_decode: whether they have their prompts behind them before the request comes.
        their_tokens: how many tokens they may have, more than they get beside the request.
        hinted: whether the neighbours have the same prompts, and the ones are told the beginnings
            of their answers.
        regex: that the request follows, and those neighbours that repeat themselves.

    """

    method: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, int] = (60, 60)
    they_decode: bool = True
    their_tokens: int = 400
    hinted: bool = False
    regex: str | None = None


ATTACKS = {
    "time": Attack({**GROWN, "row_cost": 0.05}),
    "time of a template": Attack({**PAPER, "row_cost": 0.05}),
    "what a draft model's choices are worth": Attack({**TRUNK, "row_cost": 0.05}),
    "rows": Attack(GROWN, {"max_num_batched_tokens": 32}),
    "rows of a template": Attack(PAPER, {"max_num_batched_tokens": 32}),
    "KV blocks": Attack(
        GROWN, {"num_gpu_blocks_override": 44, "block_size": 32, "max_model_len": 512}
    ),
    "room beside prompts": Attack(
        {**GROWN, "budget_share": 1.0},
        {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 20},
        lengths=(360, 60),
        they_decode=False,
    ),
    "hints": Attack({**GROWN, "row_cost": 0.05}, their_tokens=1000, hinted=True),
    "grammars": Attack(
        {**GROWN, "row_cost": 0.05},
        their_tokens=1000,
        regex="(The (first|last) number is [0-9]{3}, )+",
    ),
    "room in the table": Attack({**GROWN, "context_mib": 1, "k": 64}, their_tokens=1000),
}

Trace = list[tuple[int, tuple[int, ...]]]


@pytest.mark.parametrize("name", ATTACKS)
def test_drafts_say_nothing_of_the_neighbours(name, monkeypatch):
    traces = attack(ATTACKS[name], {"scope": "isolated"}, monkeypatch)
    assert any(draft for _, draft in traces[0])
    assert traces[0] == traces[1]


@pytest.mark.parametrize("name", ATTACKS)
def test_without_isolation_they_do(name, monkeypatch):
    traces = attack(ATTACKS[name], {}, monkeypatch)
    assert traces[0] != traces[1]


def attack(how: Attack, scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[Trace]:
    """What is drafted beside the ones, and then beside the others."""
    with engine({**how.method, **scope}, **{"max_num_seqs": 8, **how.settings}) as llm:
        choose, vocab = random.Random(0), len(llm.get_tokenizer())
        phrases = [[choose.randrange(vocab) for _ in range(3)] for _ in range(NUM_NEIGHBOURS)]
        repeated, mixed = how.lengths
        kinds = [
            [(phrase * repeated)[:repeated] for phrase in phrases],
            [[choose.randrange(vocab) for _ in range(mixed)] for _ in phrases],
        ]
        endless = SamplingParams(temperature=0, max_tokens=how.their_tokens, ignore_eos=True)
        told, probe = [[endless] * NUM_NEIGHBOURS] * 2, PROBE
        if how.regex is not None:
            probe = with_regex(PROBE, how.regex)
            told[0] = [with_regex(endless, how.regex)] * NUM_NEIGHBOURS
        if how.hinted:
            kinds = kinds[1:] * 2
            first = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
            answers = generate(llm, [{"prompt_token_ids": ids} for ids in kinds[0]], first)
            told[0] = [with_hint(endless, [*answer]) for (answer,) in answers]
        return [
            trace(llm, [*zip(neighbours, params, strict=True)], probe, how.they_decode, monkeypatch)
            for neighbours, params in zip(kinds, told, strict=True)
        ]


def with_regex(params: SamplingParams, regex: str) -> SamplingParams:
    """A copy of sampling parameters, with a grammar."""
    params = params.clone()
    params.structured_outputs = StructuredOutputsParams(regex=regex)
    return params


def trace(
    llm: Any,
    neighbours: list[tuple[list[int], SamplingParams]],
    probe: SamplingParams,
    they_decode: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> Trace:
    """What is drafted for a request in each step, and behind how many tokens of its output.

    The others come before it, and stay until it has ended.
    """
    for number, (token_ids, params) in enumerate(neighbours):
        prompt = TokensPrompt(prompt_token_ids=token_ids)
        llm.llm_engine.add_request(f"other-{number}", prompt, params)
    decoding: set[str] = set()
    while they_decode and len(decoding) < len(neighbours):
        decoding |= {output.request_id for output in llm.llm_engine.step()}
    scheduler, seen = core(llm).scheduler, []
    schedule = scheduler.schedule

    def watching(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        assert not step.preempted_req_ids
        for name in step.num_scheduled_tokens:
            output = scheduler.requests[name].output_token_ids
            if name.startswith("probe") and output:
                assert len(step.num_scheduled_tokens) == 1 + len(neighbours)
                seen.append((len(output), tuple(step.scheduled_spec_decode_tokens.get(name, ()))))
        return step

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "schedule", watching)
        llm.llm_engine.add_request("probe", read_prompts(1)[0], probe)
        while not any(out.request_id == "probe" and out.finished for out in llm.llm_engine.step()):
            pass
    llm.llm_engine.abort_request([f"other-{number}" for number in range(len(neighbours))])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return seen
