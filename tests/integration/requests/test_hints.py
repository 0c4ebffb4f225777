"""Hints and owners of requests, and texts for all: drafts come of them, outputs tell nothing of it.

Requests of an owner find what earlier ones wrote; a cache salt is a boundary for drafts.
"""

from __future__ import annotations

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
from tests.integration.engines import core, counter, engine, runner, watch_steps

PARAMS = ({**GREEDY, "max_tokens": 16}, {**SEEDED, "max_tokens": 16, "logprobs": None})
# The second prompt is read in two steps.
REQUESTS = [((0, 16), PARAMS[0]), ((3, 60), PARAMS[1])]
# Of owners.
OWNED = [((0, 16), PARAMS[0]), ((3, 40), PARAMS[1])]
# Too many for the KV blocks. All prompts are in the first step.
CROWDED = [((i, i + 61), {**GREEDY, "max_tokens": 24}) for i in range(4)]
IN_ONE_STEP = LLM_ARGUMENTS | {"max_num_batched_tokens": 256}
SCOPES = ("isolated",) if IS_V2 else ("isolated", "shared")
# Trees at any price.
METHOD = with_sizes(GROWN, [(1, 4, 8)]) if IS_V2 else {**FREE_ROWS, "max_nodes": 8}
# Who asks: an owner and a cache salt.
NOBODY, ACME = (None, None), ("acme", None)
WITH_SALT = {
    "salt": (None, "salt"),
    "salt again": (None, "salt"),
    "other salt": (None, "other salt"),
    "acme with salt": ("acme", "salt"),
    "acme with salt again": ("acme", "salt"),
}
TURNS = {**WITH_SALT, "acme": ACME, "acme again": ACME}


def test_a_hint_makes_it_fewer_steps_and_leaves_the_output_as_it_is(served):
    for scope, found in served["hints"].items():
        assert all(one["tokens"] == served["plain"] for one in found.values())
        steps = {kind: one["steps"] for kind, one in found.items()}
        assert max(steps["ids"], steps["text"]) < 0.7 * steps["none"]
        # Else by other salts, which lead to other slots.
        assert steps["none again"] == steps["none"] or scope != "isolated"


def test_texts_that_are_learnt_make_it_fewer_steps(served):
    learnt, cold = served["learnt texts"], served["cold"]
    assert learnt["tokens"] == cold["tokens"] == served["plain"]
    assert learnt["steps"] < 0.7 * cold["steps"]
    assert served["taken in"] == [served["given"]]


def test_texts_for_all_are_refused_where_one_is_none_or_nothing_is_shared(served):
    no_text, no_list, of_isolated = served["refused texts"]
    assert "'text 2 of learn_texts' is 5, expected a text in UTF-8 or" in no_text
    assert "got 'text', expected a list of texts" in no_list
    assert served["entries of what was refused"] == 0
    assert "scope is 'isolated', expected one with shared entries" in of_isolated


def test_a_preempted_request_has_its_hint_again(served):
    crowded = served["crowded"]
    assert crowded["tokens"] == crowded["plain"]
    assert crowded["preemptions"] > 0
    assert crowded["taken in"] == len(CROWDED) + crowded["preemptions"]


def test_outputs_are_those_without_speculation(served):
    for kind in ("quiet", "busy"):
        assert all(one["tokens"] == served["plain of owners"] for one in served[kind].values())


def test_requests_of_an_owner_find_what_earlier_ones_wrote(served):
    steps = served["quiet"]
    for kind in ("acme", "salt", "acme with salt"):
        assert steps[f"{kind} again"]["steps"] < 0.7 * steps[kind]["steps"]


def test_a_cache_salt_is_a_boundary(served):
    quiet, busy = served["quiet"], served["busy"]
    assert quiet["salt"]["steps"] == quiet["other salt"]["steps"]
    assert quiet["salt"]["steps"] == quiet["acme with salt"]["steps"]
    # Others have had the same texts.
    assert [busy[kind]["steps"] for kind in busy] == [quiet[kind]["steps"] for kind in busy]
    assert served["shared by salts"] == 0 < served["shared by acme"]


def test_what_is_forgotten_is_gone(served):
    assert served["forgotten"][0] > served["forgotten"][1] == 0
    assert served["after that"]["steps"] == served["quiet"]["acme with salt"]["steps"]
    no_list, no_owner = served["refused owners"]
    assert "got 'acme', expected a list of owners" in no_list
    assert "'owner' is 1.5, expected an integer of 64 bits, or a text" in no_owner


def test_nothing_waits_for_the_device(served):
    assert served["waits"] == []


def with_hints(requests: Any, hints: Any) -> Any:
    pairs = zip(requests, hints, strict=True)
    return [(at, {**params, "extra_args": {"hint": hint}}) for (at, params), hint in pairs]


def serve(llm: Any, requests: Any) -> dict[str, Any]:
    """Token ids, and how many rows of requests it took."""
    steps = watch_steps(llm)
    return {
        "tokens": tokens_of(llm, requests),
        "steps": sum(len(step.num_scheduled_tokens) for step in steps),
    }


def serve_owner(llm: Any, owner: str | None, salt: str | None) -> dict[str, Any]:
    """Token ids of the requests one after the other, and how many steps they took."""
    token_ids, tokens, steps = llm.get_tokenizer().encode(TEXT), [], watch_steps(llm)
    for at, given in OWNED:
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids[slice(*at)]}
        prompt |= {} if salt is None else {"cache_salt": salt}
        params = SamplingParams(**given, extra_args={"owner": owner})
        [request] = llm.generate([prompt], params, use_tqdm=False)
        tokens.append([*request.outputs[0].token_ids])
    return {"tokens": tokens, "steps": len(steps)}


def serve_owners(llm: Any) -> dict[str, Any]:
    """What each finds that asks again, without others' entries and with them."""
    drafter, shared, found = runner(llm).tree_drafter, [], {"quiet": {}}
    for kind, who in TURNS.items():
        found["quiet"][kind] = serve_owner(llm, *who)
        shared.append(int((drafter.state.matrix.shared_entries() >= 0).sum()))
    found["shared by salts"], found["shared by acme"] = shared[len(WITH_SALT) - 1], shared[-1]
    found["forgotten"] = [forget(llm, ["acme"]) for _ in range(2)]
    found["after that"] = serve_owner(llm, *WITH_SALT["acme with salt"])
    found["refused owners"] = [refusal(llm, "forget", owners) for owners in ("acme", [1.5])]
    drafter.reset()
    forget(llm, ["salt", "other salt", "acme"])
    for who in (NOBODY, ACME) * 2:
        serve_owner(llm, *who)
    return found | {"busy": {kind: serve_owner(llm, *who) for kind, who in WITH_SALT.items()}}


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
        plain, owned, crowded = (tokens_of(llm, each) for each in (REQUESTS, OWNED, CROWDED))
        token_ids, decode = llm.get_tokenizer().encode(TEXT), llm.get_tokenizer().decode
    hints = {
        "none": [None] * len(REQUESTS),
        "ids": plain,
        "text": [decode(tokens) for tokens in plain],
        "wrong": plain[::-1],
        "none again": [None] * len(REQUESTS),
    }

    def serve_hints(llm: Any, scope: str) -> None:
        by_scope[scope] = {}
        for kind, given in hints.items():
            if scope != "isolated":
                runner(llm).tree_drafter.reset()
            by_scope[scope][kind] = serve(llm, with_hints(REQUESTS, given))

    for scope in SCOPES:
        method = GROWN | {"scope": scope}
        with engine(method, **LLM_ARGUMENTS | {"enable_prefix_caching": False}) as llm:
            if IS_V2:
                waits.watch(runner(llm), "add_requests")
            serve_hints(llm, scope)
            if scope == "isolated":
                of_isolated = refusal(llm, "learn_texts", [TEXT])
    with engine(METHOD, **IN_ONE_STEP) as llm:
        drafter = runner(llm).tree_drafter
        if IS_V2:
            waits.watch(runner(llm), "add_requests")
        result = serve_owners(llm)
        if not IS_V2:
            serve_hints(llm, "sequence")
        drafter.reset()
        result["cold"] = serve(llm, REQUESTS)
        drafter.reset()
        answers = zip(REQUESTS, plain, strict=True)
        texts = [token_ids[slice(*at)] + answer for (at, _), answer in answers]
        texts.append("One text.")
        of_text = llm.get_tokenizer().encode(texts[-1], add_special_tokens=False)
        result["given"] = sum(map(len, texts[:-1])) + len(of_text)
        result["taken in"] = core(llm).collective_rpc("learn_texts", args=(texts,))
        learnt = drafter.state.matrix.num_written
        refused = [refusal(llm, "learn_texts", given) for given in (["One text.", 5], "text")]
        result["entries of what was refused"] = drafter.state.matrix.num_written - learnt
        result["learnt texts"] = serve(llm, REQUESTS)
        taken_in, take_in = [], drafter.take_in
        drafter.take_in = lambda *args: (taken_in.append(args), take_in(*args))
        # They are wrong, so that nobody is done early.
        found = serve(llm, with_hints(CROWDED, [tokens[::-1] for tokens in crowded]))
        found |= {"plain": crowded, "taken in": len(taken_in)}
        found["preemptions"] = counter(llm, "num_preemptions")
    return result | {
        "plain": plain,
        "plain of owners": owned,
        "hints": by_scope,
        "refused texts": [*refused, of_isolated],
        "crowded": found,
        "waits": waits.seen,
    }
