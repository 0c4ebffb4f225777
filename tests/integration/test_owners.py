"""Owners: requests of one find what earlier ones wrote; a cache salt is a boundary for drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import GROWN as FREE_ROWS
from engines import NEEDS_SUFFIX, SMALL_OUROBOROS, TARGET, core, engine, runner, watch_steps
from v2_engines import GREEDY, GROWN, IS_V2, LLM_ARGUMENTS, SEEDED, TEXT, Waits, with_sizes
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from vllm_recycle.core.owners import Owner
from vllm_recycle.integration.plugin import register
from vllm_recycle.integration.requests import digest, hinted_text, owner_of

REQUESTS = [((0, 16), {**GREEDY, "max_tokens": 16}), ((3, 40), {**SEEDED, "max_tokens": 16})]
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


def test_outputs_are_those_without_speculation(served):
    for kind in ("quiet", "busy"):
        assert all(one["tokens"] == served["plain"] for one in served[kind].values())


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
    assert "got 'acme', expected a list of owners" in served["refused"][0]
    assert "'owner' is 1.5, expected an integer of 64 bits, or a text" in served["refused"][1]


def test_nothing_waits_for_the_device(served):
    assert served["waits"] == []


def serve(llm: Any, owner: str | None, salt: str | None) -> dict[str, Any]:
    """Token ids of the requests one after the other, and how many steps they took."""
    token_ids, tokens, steps = llm.get_tokenizer().encode(TEXT), [], watch_steps(llm)
    for at, given in REQUESTS:
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids[slice(*at)]}
        if salt is not None:
            prompt["cache_salt"] = salt
        params = SamplingParams(**given, extra_args={"owner": owner})
        [request] = llm.generate([prompt], params, use_tqdm=False)
        tokens.append([*request.outputs[0].token_ids])
    return {"tokens": tokens, "steps": len(steps)}


def forget(llm: Any, owners: Any) -> int:
    [entries] = core(llm).collective_rpc("forget", args=(owners,))
    return entries


def refusal(llm: Any, owners: Any) -> str:
    with pytest.raises(ValueError, match="expected") as error:
        forget(llm, owners)
    return str(error.value)


def main(_: Path) -> dict[str, Any]:
    """With each runner."""
    arguments, waits = LLM_ARGUMENTS | {"enable_prefix_caching": False}, Waits()
    with engine(**arguments) as llm:
        found: dict[str, Any] = {"plain": serve(llm, *NOBODY)["tokens"]}
    with engine(METHOD, **arguments) as llm:
        drafter, shared = runner(llm).tree_drafter, []
        if IS_V2:
            waits.watch(runner(llm), "add_requests")
        found["quiet"] = {}
        for kind, who in TURNS.items():
            found["quiet"][kind] = serve(llm, *who)
            shared.append(int((drafter.state.matrix.shared_entries() >= 0).sum()))
        found["shared by salts"], found["shared by acme"] = shared[len(WITH_SALT) - 1], shared[-1]
        found["forgotten"] = [forget(llm, ["acme"]) for _ in range(2)]
        found["after that"] = serve(llm, *WITH_SALT["acme with salt"])
        found["refused"] = [refusal(llm, owners) for owners in ("acme", [1.5])]
        drafter.reset()
        forget(llm, ["salt", "other salt", "acme"])
        for who in (NOBODY, ACME) * 2:
            serve(llm, *who)
        found["busy"] = {kind: serve(llm, *who) for kind, who in WITH_SALT.items()}
    return found | {"waits": waits.seen}


# What is accepted, without an engine.


NGRAM = {"method": "ngram", "num_speculative_tokens": 2}


def processor_of(method: dict[str, Any]) -> InputProcessor:
    register()
    arguments = EngineArgs(TARGET, speculative_config=method, max_model_len=64)
    return InputProcessor(arguments.create_engine_config())


def processed(method: dict[str, Any], owner: Any, salt: str | None = None) -> Any:
    """A request that reaches the engine."""
    prompt = {"type": "token", "prompt_token_ids": [5, 6]}
    prompt |= {} if salt is None else {"cache_salt": salt}
    params = SamplingParams(extra_args={"owner": owner})
    tasks = ("generate",)
    return processor_of(method).process_inputs("0", prompt, params, supported_tasks=tasks)


SECRET = digest("salt")
WITH_SUFFIX = {**FREE_ROWS, "trunk": {"method": "suffix"}}


@pytest.mark.parametrize(
    ("owner", "salt", "expected"),
    [
        ("a", None, Owner("a")),
        (-(1 << 62), None, Owner(-(1 << 62))),
        (None, "salt", Owner(SECRET, SECRET)),
        ("a", "salt", Owner("a", SECRET)),
        ("a", "", Owner("a")),  # vLLM takes an empty salt for none
        (None, "", None),
        (None, None, None),
    ],
)
def test_whose_a_request_is(owner, salt, expected):
    assert owner_of(processed(FREE_ROWS, owner, salt)) == expected


@pytest.mark.parametrize("name", [["a", "salt"], 1.5, "", True, {}, "\ud800"])
def test_what_no_frontend_has_checked_is_nobodys(name):
    request = processed(FREE_ROWS, "a")
    request.sampling_params.extra_args = {"owner": name, "hint": [name, 5]}
    assert owner_of(request) is None
    assert hinted_text(request.sampling_params, [1, 2]) in ([], [-1, 1, 2, "a", "salt"])


@pytest.mark.parametrize(
    "method",
    [
        {**FREE_ROWS, "scope": "isolated"},
        {**FREE_ROWS, "scope": "shared"},
        {**SMALL_OUROBOROS, "scope": "request"},
        NGRAM,
    ],
)
def test_a_cache_salt_is_accepted(method):
    assert processed(method, None, "salt").cache_salt == "salt"


@pytest.mark.parametrize(
    ("method", "owner", "salt", "message"),
    [
        (FREE_ROWS, "", None, "'owner' is '', expected an integer of 64 bits, or a text of 1 to"),
        (FREE_ROWS, "a" * 257, None, "expected an integer of 64 bits, or a text of 1 to 256"),
        (FREE_ROWS, 1 << 63, None, "expected an integer of 64 bits"),
        (FREE_ROWS, "\ud800", None, "expected an integer of 64 bits, or a text of 1 to 256"),
        (FREE_ROWS, None, "\ud800", r"'cache_salt' is '\\ud800', expected a text in UTF-8"),
        (FREE_ROWS, True, None, "'owner' is True, expected an integer"),
        (FREE_ROWS, ["a", "salt"], None, "expected an integer of 64 bits"),
        ({**FREE_ROWS, "scope": "shared"}, "a", None, "with scope 'shared' has none"),
        ({**FREE_ROWS, "scope": "isolated"}, "a", None, "with scope 'isolated' has none"),
        (SMALL_OUROBOROS, "a", None, "the method ouroboros with scope 'shared' has none"),
        pytest.param(
            WITH_SUFFIX,
            None,
            "salt",
            "expected none: a trunk by suffix drafts from the outputs of",
            marks=NEEDS_SUFFIX,
        ),
        (SMALL_OUROBOROS, None, "salt", "'cache_salt' is 'salt', expected none: all requests sh"),
    ],
)
def test_what_is_wrong_is_refused(method, owner, salt, message):
    with pytest.raises(VLLMValidationError, match=message):
        processed(method, owner, salt)
