"""Hints and owners of requests, and texts for all: drafts come of them, outputs tell nothing of it.

Requests of an owner find what earlier ones wrote; a cache salt is a boundary for drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.integration.cuda.v2_engines import (
    GREEDY,
    GROWN,
    IS_V2,
    LLM_ARGUMENTS,
    SEEDED,
    TEXT,
    Waits,
    tokens_of,
    with_sizes,
)
from tests.integration.engines import GROWN as FREE_ROWS
from tests.integration.engines import core, counter, engine, generate, runner, watch_steps

LENGTH = 12 if IS_V2 else 16  # the interpreter is slow
PARAMS = ({**GREEDY, "max_tokens": LENGTH}, {**SEEDED, "max_tokens": LENGTH, "logprobs": None})
# The second prompt is read in two steps.
REQUESTS = [((0, 16), PARAMS[0]), ((3, 60), PARAMS[1])]
NUM_OF_SOMEBODY = 1 if IS_V2 else 2
# Too many for the KV blocks.
CROWDED = [((i, i + 61), {**GREEDY, "max_tokens": LENGTH}) for i in range(4)]
IN_ONE_STEP = LLM_ARGUMENTS | {"max_num_batched_tokens": 256}
WITHOUT_PREFIXES = LLM_ARGUMENTS | {"enable_prefix_caching": False}
# Trees at any price.
METHOD = with_sizes(GROWN, [(1, 4, 8)]) if IS_V2 else {**FREE_ROWS, "max_nodes": 8}
SALT = "salt" * 100  # a salt may be longer than an owner's name
# Who asks, an owner or a cache salt or both; those with salts first.
WITH_SALT = {
    "salt": {"salt": SALT},
    "salt again": {"salt": SALT},
    "other salt": {"salt": "other salt"},
    "acme with salt": {"owner": "acme", "salt": "salt"},
    "acme with salt again": {"owner": "acme", "salt": "salt"},
}
TURNS = {**WITH_SALT, "acme": {"owner": "acme"}, "acme again": {"owner": "acme"}}


def test_the_text_of_what_gets_no_drafts_is_not_taken_in(served):
    """Its output is, a few tokens."""
    drafted, *others = served["written"]
    assert 0 < max(others) < 60 < drafted


def test_a_hint_makes_it_fewer_steps_and_leaves_the_output_as_it_is(served):
    for scope, steps in served["hints"].items():
        assert max(steps["ids"], steps["text"]) < 0.7 * steps["none"]
        # Else by other salts, which lead to other slots.
        assert steps["none again"] == steps["none"] or scope != "isolated"


def test_texts_that_are_learnt_make_it_fewer_steps(served):
    assert served["learnt texts"] < 0.7 * served["cold"]
    assert served["taken in"] == [served["given"]]


def test_texts_for_all_are_refused_where_one_is_none_or_nothing_is_shared(served):
    no_text, no_list, *of_isolated = served["refused texts"]
    assert "'text 2 of learn_texts' is 5, expected a text in UTF-8 or" in no_text
    assert "got 'text', expected a list of texts" in no_list
    assert served["entries of what was refused"] == 0
    for refused in of_isolated:
        assert "scope is 'isolated', expected one with shared entries" in refused


def test_a_preempted_request_has_its_hint_again(served):
    crowded = served["crowded"]
    assert crowded["preemptions"] > 0
    assert crowded["hints"] == len(CROWDED) + crowded["preemptions"]


def test_requests_of_an_owner_find_what_earlier_ones_wrote(served):
    steps = served["quiet"]
    for kind in ("acme", "salt", "acme with salt"):
        assert steps[f"{kind} again"] < 0.7 * steps[kind]


def test_a_cache_salt_is_a_boundary(served):
    quiet, busy = served["quiet"], served["busy"]
    assert quiet["salt"] == quiet["other salt"] == quiet["acme with salt"]
    # Others have had the same texts. What they left may lie where a salt's would.
    for kind, steps in busy.items():
        assert quiet[kind] <= steps <= quiet[kind] + 1
    assert served["shared by salts"] == 0 < served["shared by acme"]


def test_what_is_forgotten_is_gone(served):
    assert served["forgotten"][0] > served["forgotten"][1] == 0
    assert served["after that"] == served["quiet"]["acme with salt"]
    no_list, no_owner = served["refused owners"]
    assert "got 'acme', expected a list of owners" in no_list
    assert "'owner' is 1.5, expected an integer of 64 bits, or a text" in no_owner


def test_nothing_waits_for_the_device(served):
    assert served["waits"] == []


def serve(
    llm: Any,
    expected: list[list[int]],
    hints: Sequence[Any] = (None,) * len(REQUESTS),
    *,
    requests: Any = REQUESTS,
    owner: str | None = None,
    salt: str | None = None,
) -> int:
    """Serve requests as without speculation, and say how many rows of requests that took.

    Those of somebody come one after the other, with Model Runner V2 the first alone.
    """
    token_ids, steps = llm.get_tokenizer().encode(TEXT), watch_steps(llm)
    salts = {} if salt is None else {"cache_salt": salt}
    prompts = [{"prompt_token_ids": token_ids[slice(*at)], **salts} for at, _ in requests]
    params = [
        SamplingParams(**given, extra_args={"hint": hint, "owner": owner})
        for (_, given), hint in zip(requests, hints, strict=True)
    ]
    count, size = (NUM_OF_SOMEBODY, 1) if owner or salt else (len(params), len(params))
    for at in range(0, count, size):
        some = slice(at, at + size)
        found = generate(llm, prompts[some], params[some])
        assert found == [[tuple(tokens)] for tokens in expected[some]]
    return sum(len(step.num_scheduled_tokens) for step in steps)


def serve_owners(llm: Any, plain: list[list[int]]) -> dict[str, Any]:
    """What each finds that asks again, without others' entries and with them."""
    drafter, shared, found = runner(llm).tree_drafter, [], {"quiet": {}}
    for kind, who in TURNS.items():
        found["quiet"][kind] = serve(llm, plain, **who)
        shared.append(int((drafter.state.matrix.shared_entries() >= 0).sum()))
    found["shared by salts"], found["shared by acme"] = shared[len(WITH_SALT) - 1], shared[-1]
    found["forgotten"] = [forget(llm, ["acme"]) for _ in range(2)]
    found["after that"] = serve(llm, plain, owner="acme", salt="salt")
    found["refused owners"] = [refusal(llm, "forget", owners) for owners in ("acme", [1.5])]
    drafter.reset()
    forget(llm, [SALT, "other salt", "acme"])
    for owner in (None, "acme"):
        serve(llm, plain, owner=owner)
    kinds = ("salt", "salt again", "acme with salt")
    found["busy"] = {kind: serve(llm, plain, **TURNS[kind]) for kind in kinds}
    return found


def forget(llm: Any, owners: list[str]) -> int:
    [entries] = core(llm).collective_rpc("forget", args=(owners,))
    return entries


def refusal(llm: Any, function: str, given: Any) -> str:
    with pytest.raises(ValueError, match="expected") as error:
        core(llm).collective_rpc(function, args=(given,))
    return str(error.value)


def main(_: Path) -> dict[str, Any]:
    """With each runner."""
    waits, by_scope = Waits(), {}
    with engine(**IN_ONE_STEP) as llm:  # plain vLLM on a CPU has no seeds with prompts in parts
        plain, crowded = tokens_of(llm, REQUESTS), tokens_of(llm, CROWDED)
        token_ids, decode = llm.get_tokenizer().encode(TEXT), llm.get_tokenizer().decode
    nothing = [None] * len(REQUESTS)
    hints = {"none": nothing, "ids": plain, "text": [*map(decode, plain)], "wrong": plain[::-1]}
    hints["none again"] = nothing

    def serve_hints(llm: Any, scope: str) -> None:
        by_scope[scope] = {}
        for kind, given in hints.items():
            if scope != "isolated":
                runner(llm).tree_drafter.reset()
            by_scope[scope][kind] = serve(llm, plain, given)

    of_isolated = []
    for scope in () if IS_V2 else ("isolated", "shared"):
        with engine(GROWN | {"scope": scope, "row_cost": 0.02}, **WITHOUT_PREFIXES) as llm:
            serve_hints(llm, scope)
            if scope == "isolated":
                of_isolated.append(refusal(llm, "learn_texts", [TEXT]))
    with engine(METHOD, **WITHOUT_PREFIXES if IS_V2 else IN_ONE_STEP) as llm:
        drafter = runner(llm).tree_drafter
        if IS_V2:
            waits.watch(runner(llm), "add_requests")
        result = serve_owners(llm, plain)
        serve_hints(llm, "sequence")
        drafter.reset()
        result["written"] = []
        for max_tokens, speculate in ((2, True), (1, True), (2, False)):
            extra_args = {"hint": plain[1], "speculate": speculate}
            params = SamplingParams(**GREEDY | {"max_tokens": max_tokens, "extra_args": extra_args})
            generate(llm, [{"prompt_token_ids": token_ids[:60]}], [params])
            result["written"].append(drafter.state.matrix.num_written)
            drafter.reset()
        result["cold"] = serve(llm, plain)
        drafter.reset()
        answers = zip(REQUESTS, plain, strict=True)
        texts = [token_ids[slice(*at)] + answer for (at, _), answer in answers]
        of_text = llm.get_tokenizer().encode("One text.", add_special_tokens=False)
        result["given"] = len(of_text) + sum(map(len, texts))
        result["taken in"] = core(llm).collective_rpc("learn_texts", args=([*texts, "One text."],))
        learnt = drafter.state.matrix.num_written
        refused = [refusal(llm, "learn_texts", given) for given in (["One text.", 5], "text")]
        result["entries of what was refused"] = drafter.state.matrix.num_written - learnt
        result["learnt texts"] = serve(llm, plain)
        given_hints, add_requests = [], drafter.add_requests

        def watched(requests: Any) -> None:
            given_hints.extend(request.hint for request in requests if request.hint)
            add_requests(requests)

        drafter.add_requests = watched
        # They are wrong, so that nobody is done early.
        serve(llm, crowded, [tokens[::-1] for tokens in crowded], requests=CROWDED)
        preemptions = counter(llm, "num_preemptions")
    return result | {
        "hints": by_scope,
        "refused texts": refused + of_isolated,
        "crowded": {"hints": len(given_hints), "preemptions": preemptions},
        "waits": waits.seen,
    }
