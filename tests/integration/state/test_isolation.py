"""Under `isolated` nothing of a request's drafts tells of its neighbours: found by attacking it.

A request decodes beside others that repeat themselves, whose drafts are long and accepted, and
beside as many that do not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
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

NUM_NEIGHBOURS = 1 if IS_V2 else 3
ENDLESS = {"temperature": 0, "ignore_eos": True}
PROBE = {**ENDLESS, "max_tokens": 12 if IS_V2 else 40}


@dataclass(frozen=True)
class Neighbours:
    """How the others come.

    Attributes:
        lengths: of their prompts, of those that repeat themselves and the others.
        decode: whether they have their prompts behind them before the request comes.
        num_tokens: how many tokens they may have, more than they get beside the request.
        hinted: whether they have the same prompts, and the ones are told the beginnings of their
            answers.
        regex: that the request follows, and those neighbours that repeat themselves.
        salted: whether each, and the request, has a cache salt of its own.

    """

    lengths: tuple[int, int] = (60, 60)
    decode: bool = True
    num_tokens: int = 400
    hinted: bool = False
    regex: str | None = None
    salted: bool = False


# What is scarce: the method that is attacked, the engine's settings, and the neighbours.
ATTACKS: dict[str, tuple[Any, ...]] = {
    "time": (
        {**GROWN, "row_cost": 0.05},
        {},
        Neighbours(),
        Neighbours(num_tokens=1000, hinted=True),
        Neighbours(num_tokens=1000, regex="(The (first|last) number is [0-9]{3}, )+"),
    ),
    "time of a template": ({**PAPER, "row_cost": 0.05}, {}, Neighbours()),
    "what a draft model's choices are worth": ({**TRUNK, "row_cost": 0.0}, {}, Neighbours()),
    "rows": (GROWN, {"max_num_batched_tokens": 32}, Neighbours()),
    "rows of a template": (PAPER, {"max_num_batched_tokens": 32}, Neighbours()),
    "KV blocks": (GROWN, {"num_gpu_blocks_override": 44, "block_size": 32, "max_model_len": 512},
                  Neighbours()),
    "room beside prompts": (
        {**GROWN, "budget_share": 1.0},
        {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 20},
        Neighbours(lengths=(360, 60), decode=False),
    ),
    "room in the table": ({**GROWN, "context_mib": 1, "k": 64}, {}, Neighbours(num_tokens=1000)),
    "nothing": (GROWN, {}, *(Neighbours(num_tokens=1000, salted=one) for one in (False, True))),
}  # fmt: skip

# On Model Runner V2. Few KV blocks, so that a draft must end with its request's last one. Trees
# have the same sizes whatever the scope.
ON_V2 = (
    with_sizes({**TOKEN_RECYCLING, "max_nodes": 6, "context_mib": 1}, [(1, 4, 6)]),
    {
        **LLM_ARGUMENTS,
        "model": TARGET,
        "max_model_len": 192,
        "max_num_batched_tokens": 96,
        "num_gpu_blocks_override": 8,
        "enable_prefix_caching": False,
    },
    Neighbours(lengths=(40, 40), num_tokens=150),
)
SCOPES = ("isolated", "sequence")
Trace = list[list[Any]]


@pytest.fixture(scope="module")
def on_v2(request, tmp_path_factory) -> dict[str, list[list[Trace]]]:
    return run_script(request.path, tmp_path_factory.mktemp("v2"))


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        *((name, scope) for name in ATTACKS for scope in SCOPES),
        ("nothing", "shared"),
        *(pytest.param("Model Runner V2", scope, marks=pytest.mark.slow) for scope in SCOPES),
    ],
)
def test_drafts_tell_of_neighbours_only_without_isolation_and_salts(name, scope, request):
    if name in ATTACKS:
        (_, _, *ways), found = ATTACKS[name], attack(*ATTACKS[name], scope=scope)
    else:
        ways, found = ON_V2[2:], request.getfixturevalue("on_v2")[scope]
    for way, (one, other) in zip(ways, found, strict=True):
        assert (one == other) == (way.salted or scope == "isolated")
        if one == other or name == "nothing":
            assert any(draft for _, draft in one)  # of its own text, at least


def main(_: Path) -> dict[str, list[list[Trace]]]:
    """In a process with Model Runner V2."""
    return {scope: attack(*ON_V2, scope=scope) for scope in SCOPES}


def attack(method: Any, settings: Any, *ways: Neighbours, scope: str) -> list[list[Trace]]:
    """Each time what is drafted beside the ones, and then beside the others."""
    with engine({**method, "scope": scope}, **{"max_num_seqs": 8, **settings}) as llm:
        return [attack_one(llm, how, scope) for how in ways]


def attack_one(llm: Any, how: Neighbours, scope: str) -> list[Trace]:
    choose, vocab = random.Random(0), len(llm.get_tokenizer())
    phrases = [[choose.randrange(vocab) for _ in range(3)] for _ in range(NUM_NEIGHBOURS)]
    if IS_V2:  # sizes say nothing there: the neighbour repeats what the request begins with
        phrases = [llm.get_tokenizer().encode(TEXT)[:20]]
    repeated, mixed = how.lengths
    kinds = [
        [(phrase * repeated)[:repeated] for phrase in phrases],
        [[choose.randrange(vocab) for _ in range(mixed)] for _ in phrases],
    ]
    grammar = {"structured_outputs": StructuredOutputsParams(regex=how.regex)} if how.regex else {}
    theirs = {**ENDLESS, "max_tokens": how.num_tokens}
    told = [[SamplingParams(**theirs, **more)] * NUM_NEIGHBOURS for more in (grammar, {})]
    if how.hinted:
        kinds = kinds[1:] * 2
        first = SamplingParams(**ENDLESS, max_tokens=100)
        answers = generate(llm, [{"prompt_token_ids": ids} for ids in kinds[0]], first)
        told[0] = [with_hint(told[1][0], [*answer]) for (answer,) in answers]
    traces = []
    for neighbours, params in zip(kinds, told, strict=True):
        if scope != "isolated":  # else what the request has taught is known the second time
            runner(llm).tree_drafter.reset()
        probe = SamplingParams(**PROBE, **grammar)
        traces.append(trace(llm, neighbours, params, probe, how))
    return traces


def trace(llm: Any, neighbours: list[Any], params: list[Any], probe: Any, how: Neighbours) -> Trace:
    """What is drafted for a request in each step, and behind how many tokens of its output.

    The others come before it, and stay until it has ended. The scheduler of Model Runner V2 sees
    how long drafts are; their tokens are where they are made.
    """

    def add(name: str, given: Any, **prompt: Any) -> None:
        prompt |= {"cache_salt": f"salt of {name}"} if how.salted else {}
        llm.llm_engine.add_request(name, prompt, given)

    names = [f"other-{number}" for number in range(len(neighbours))]
    for name, token_ids, given in zip(names, neighbours, params, strict=True):
        add(name, given, prompt_token_ids=token_ids)
    decoding: set[str] = set()
    while how.decode and len(decoding) < len(neighbours):
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "schedule", watching)
        if IS_V2:
            propose = runner(llm).speculator.propose
            patch.setattr(runner(llm).speculator, "propose", watching_propose)
            add("probe", probe, prompt_token_ids=llm.get_tokenizer().encode(TEXT)[:75])
        else:
            add("probe", probe, prompt=read_prompts(1)[0])
        while not any(out.request_id == "probe" and out.finished for out in llm.llm_engine.step()):
            pass
    llm.llm_engine.abort_request(names)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return seen
