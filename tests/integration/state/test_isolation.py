"""Under `isolated` nothing of a request's drafts tells of its neighbours: found by attacking it.

A request decodes beside others that repeat themselves, whose drafts are long and accepted, and
beside as many that do not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.cuda.v2_engines import IS_V2, LLM_ARGUMENTS, TEXT, with_sizes
from tests.integration.cuda.v2_scripts import run_script
from tests.integration.engines import (
    GROWN,
    PAPER,
    TARGET,
    TOKEN_RECYCLING,
    TRUNK,
    core,
    engine,
    generate,
    read_prompts,
    runner,
    with_hint,
)
from vllm_recycle.core.adjacency import SCOPES

NUM_NEIGHBOURS = 1 if IS_V2 else 3
PROBE = SamplingParams(temperature=0, max_tokens=12 if IS_V2 else 40, ignore_eos=True)


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
        salted: whether each has a cache salt of its own.

    """

    method: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, int] = (60, 60)
    they_decode: bool = True
    their_tokens: int = 400
    hinted: bool = False
    regex: str | None = None
    salted: bool = False


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

# On Model Runner V2. Few KV blocks, so that a draft must end with its request's last one. Trees
# have the same sizes whatever the scope.
ON_V2 = Attack(
    with_sizes({**TOKEN_RECYCLING, "max_nodes": 6, "context_mib": 1}, [(1, 4, 6)]),
    {
        **LLM_ARGUMENTS,
        "model": TARGET,
        "max_model_len": 192,
        "max_num_batched_tokens": 96,
        "num_gpu_blocks_override": 8,
        "enable_prefix_caching": False,
    },
    lengths=(40, 40),
    their_tokens=150,
)
ON_V2_SCOPES = ("isolated", "sequence")
everywhere = pytest.mark.parametrize(
    "name", [*ATTACKS, pytest.param("Model Runner V2", marks=pytest.mark.slow)]
)

Trace = list[list[Any]]


@pytest.fixture(scope="module")
def on_v2(request, tmp_path_factory) -> dict[str, list[Trace]]:
    return run_script(request.path, tmp_path_factory.mktemp("v2"))


def traces_of(name: str, scope: str, request: pytest.FixtureRequest) -> list[Trace]:
    if name in ATTACKS:
        return attack(ATTACKS[name], scope)
    return request.getfixturevalue("on_v2")[scope]


@everywhere
def test_drafts_say_nothing_of_the_neighbours(name, request):
    traces = traces_of(name, "isolated", request)
    assert any(draft for _, draft in traces[0])
    assert traces[0] == traces[1]


@everywhere
def test_without_isolation_they_do(name, request):
    traces = traces_of(name, "sequence", request)
    assert traces[0] != traces[1]


@pytest.mark.parametrize("salted", [True, False])
@pytest.mark.parametrize("scope", SCOPES)
def test_with_cache_salts_they_say_nothing_under_any_scope(scope, salted):
    # Rows are free, and there is room for all.
    traces = attack(Attack(GROWN, their_tokens=1000, salted=salted), scope)
    assert (traces[0] == traces[1]) == (salted or scope == "isolated")
    assert any(draft for _, draft in traces[0]) != (salted and scope == "shared")


def main(_: Path) -> dict[str, list[Trace]]:
    """In a process with Model Runner V2."""
    return {scope: attack(ON_V2, scope) for scope in ON_V2_SCOPES}


def attack(how: Attack, scope: str) -> list[Trace]:
    """What is drafted beside the ones, and then beside the others."""
    with engine({**how.method, "scope": scope}, **{"max_num_seqs": 8, **how.settings}) as llm:
        choose, vocab = random.Random(0), len(llm.get_tokenizer())
        phrases = [[choose.randrange(vocab) for _ in range(3)] for _ in range(NUM_NEIGHBOURS)]
        if IS_V2:  # sizes say nothing there: the neighbour repeats what the request begins with
            phrases = [llm.get_tokenizer().encode(TEXT)[:20]]
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
        traces = []
        for neighbours, params in zip(kinds, told, strict=True):
            if scope != "isolated":  # else what the request has taught is known the second time
                runner(llm).tree_drafter.reset()
            others = [*zip(neighbours, params, strict=True)]
            traces.append(trace(llm, others, probe, how.they_decode, salted=how.salted))
        return traces


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
    *,
    salted: bool,
) -> Trace:
    """What is drafted for a request in each step, and behind how many tokens of its output.

    The others come before it, and stay until it has ended. The scheduler of Model Runner V2 sees
    how long drafts are; their tokens are where they are made.
    """
    for number, (token_ids, params) in enumerate(neighbours):
        prompt = TokensPrompt(prompt_token_ids=token_ids)
        if salted:
            prompt["cache_salt"] = f"salt-{number}"
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
                seen.append([len(output), [*step.scheduled_spec_decode_tokens.get(name, ())]])
        return step

    def watching_propose(batch: Any, *args: Any, **given: Any) -> Any:
        drafts = propose(batch, *args, **given)
        for name, draft in zip(batch.req_ids, drafts.tolist(), strict=True):
            if name.startswith("probe"):
                seen.append([-1, draft])
        return drafts

    prompt = read_prompts(1)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "schedule", watching)
        if IS_V2:
            propose = runner(llm).speculator.propose
            patch.setattr(runner(llm).speculator, "propose", watching_propose)
            prompt = {"prompt_token_ids": llm.get_tokenizer().encode(TEXT)[:75]}
        if salted:
            prompt = {"prompt": prompt, "cache_salt": "salt of the probe"}
        llm.llm_engine.add_request("probe", prompt, probe)
        while not any(out.request_id == "probe" and out.finished for out in llm.llm_engine.step()):
            pass
    llm.llm_engine.abort_request([f"other-{number}" for number in range(len(neighbours))])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return seen
