"""Hints of requests, and texts for all: drafts come from them, outputs tell nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import GROWN as FREE_ROWS
from engines import SMALL_OUROBOROS, TARGET, TRUNK, core, counter, engine, runner, watch_steps
from v2_engines import GREEDY, GROWN, IS_V2, LLM_ARGUMENTS, SEEDED, TEXT, Waits, tokens_of
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from vllm_recycle.integration.plugin import register

PARAMS = ({**GREEDY, "max_tokens": 16}, {**SEEDED, "max_tokens": 16, "logprobs": None})
# The second prompt is read in two steps.
REQUESTS = [((0, 16), PARAMS[0]), ((3, 60), PARAMS[1])]
# Too many for the KV blocks. All prompts are in the first step.
CROWDED = [((i, i + 61), {**GREEDY, "max_tokens": 20}) for i in range(4)]
IN_ONE_STEP = LLM_ARGUMENTS | {"max_num_batched_tokens": 256}
SCOPES = ("isolated",) if IS_V2 else ("isolated", "sequence", "shared")


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
    assert "'text 2 of learn_texts' is 5, expected a text in UTF-8 or" in served["refused"][0]
    assert "got 'text', expected a list of texts" in served["refused"][1]
    assert served["entries of what was refused"] == 0
    assert "scope is 'isolated', expected one with shared entries" in served["refused"][2]


def test_a_preempted_request_has_its_hint_again(served):
    crowded = served["crowded"]
    assert crowded["tokens"] == crowded["plain"]
    assert crowded["preemptions"] > 0
    assert crowded["taken in"] == len(CROWDED) + crowded["preemptions"]


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


def refusal(llm: Any, texts: Any) -> str:
    with pytest.raises(ValueError, match="expected") as error:
        core(llm).collective_rpc("learn_texts", args=(texts,))
    return str(error.value)


def main(_: Path) -> dict[str, Any]:
    """With each runner."""
    waits, by_scope = Waits(), {}
    with engine(**IN_ONE_STEP) as llm:  # plain vLLM on a CPU has no seeds with prompts in parts
        plain, crowded = tokens_of(llm, REQUESTS), tokens_of(llm, CROWDED)
        token_ids, decode = llm.get_tokenizer().encode(TEXT), llm.get_tokenizer().decode
    hints = {
        "none": [None] * len(REQUESTS),
        "ids": plain,
        "text": [decode(tokens) for tokens in plain],
        "wrong": plain[::-1],
        "none again": [None] * len(REQUESTS),
    }
    for scope in SCOPES:
        method = GROWN | {"scope": scope}
        with engine(method, **LLM_ARGUMENTS | {"enable_prefix_caching": False}) as llm:
            if IS_V2:
                waits.watch(runner(llm), "add_requests")
            by_scope[scope] = {}
            for kind, given in hints.items():
                if scope != "isolated":
                    runner(llm).tree_drafter.reset()
                by_scope[scope][kind] = serve(llm, with_hints(REQUESTS, given))
            if scope == "isolated":
                of_isolated = refusal(llm, [TEXT])
    with engine(GROWN, **IN_ONE_STEP) as llm:
        drafter = runner(llm).tree_drafter
        result: dict[str, Any] = {"cold": serve(llm, REQUESTS)}
        drafter.reset()
        answers = zip(REQUESTS, plain, strict=True)
        texts = [token_ids[slice(*at)] + answer for (at, _), answer in answers]
        texts.append("One text.")
        of_text = llm.get_tokenizer().encode(texts[-1], add_special_tokens=False)
        result["given"] = sum(map(len, texts[:-1])) + len(of_text)
        result["taken in"] = core(llm).collective_rpc("learn_texts", args=(texts,))
        learnt = drafter.state.matrix.num_written
        refused = [refusal(llm, ["One text.", 5]), refusal(llm, "text")]
        result["entries of what was refused"] = drafter.state.matrix.num_written - learnt
        result["learnt texts"] = serve(llm, REQUESTS)
        taken_in, take_in = [], drafter.take_in
        drafter.take_in = lambda *args: (taken_in.append(args), take_in(*args))
        # They are wrong, so that nobody is done early.
        found = serve(llm, with_hints(CROWDED, crowded[1:] + crowded[:1]))
        found |= {"plain": crowded, "taken in": len(taken_in)}
        found["preemptions"] = counter(llm, "num_preemptions")
    return result | {
        "plain": plain,
        "hints": by_scope,
        "refused": [*refused, of_isolated],
        "crowded": found,
        "waits": waits.seen,
    }


# What is accepted, without an engine.


@pytest.fixture(scope="module")
def processors() -> dict[str, InputProcessor]:
    register()
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    methods = {"token_recycling": FREE_ROWS, "ouroboros": SMALL_OUROBOROS, "ngram": ngram}
    methods["trunk"] = TRUNK
    return {
        name: InputProcessor(
            EngineArgs(TARGET, speculative_config=method, max_model_len=64).create_engine_config()
        )
        for name, method in methods.items()
    }


def processed(processor: InputProcessor, extra_args: Any) -> Any:
    """The parameters that reach the engine, of a request with these."""
    prompt = {"type": "token", "prompt_token_ids": [5, 6]}
    params = SamplingParams(extra_args=extra_args)
    request = processor.process_inputs("0", prompt, params, supported_tasks=("generate",))
    assert params.extra_args == extra_args  # the caller's
    return request.sampling_params.extra_args


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"speculate": "no"}, "extra_args: 'speculate' is 'no', expected true or false"),
        ({"speculate": 2}, "extra_args: 'speculate' is 2, expected true or false"),
        ({"hint": 5}, "'hint' is 5, expected a text in UTF-8 or a list of token ids from 0 to"),
        ({"hint": "\ud800"}, r"'hint' is '\\ud800', expected a text in UTF-8 or a list"),
        ({"hint": ["a", 5]}, "'hint' is 5, expected a text in UTF-8 or a list"),
        ({"hint": [[7], [4096]]}, r"'hint' is \[4096\], expected a text in UTF-8 or a list"),
        ({"hint": [[7] * 64, "a"]}, "expected at most the 64 tokens of max_model_len"),
        ({"hint": ["a"] * 65}, "expected at most 64 hints"),
        ({"hint": [7, 4096]}, r"'hint' is \[7, 4096\], expected a text in UTF-8 or a list"),
        ({"hint": [-1]}, r"'hint' is \[-1\], expected a text in UTF-8 or a list"),
        ({"hint": [True]}, r"'hint' is \[True\], expected a text in UTF-8 or a list"),
        ({"hint": "a b " * 9999}, "expected at most the 64 tokens of max_model_len"),
        ({"hint": [7] * 65}, "expected at most the 64 tokens of max_model_len"),
        ({"hint": "a", "prediction": {}}, "'prediction' is {}, expected none beside 'hint'"),
        ({"prediction": "a"}, "'prediction' is 'a', expected {'type': 'content', 'content'"),
        ({"prediction": {"content": 5}}, "expected {'type': 'content', 'content': TEXT}"),
        (
            {"prediction": {"content": [{"text": 5}]}},
            "expected {'type': 'content', 'content': TEXT",
        ),
    ],
)
def test_what_is_wrong_is_refused(extra_args, message, processors):
    with pytest.raises(VLLMValidationError, match=message):
        processed(processors["token_recycling"], extra_args)


@pytest.mark.parametrize("name", ["token_recycling", "trunk"])
@pytest.mark.parametrize("hint", ["", "a b", [], [0, 4095]])
def test_token_ids_reach_the_engine(hint, name, processors):
    processor = processors[name]
    ids = processor.tokenizer.encode(hint, add_special_tokens=False) if hint == str(hint) else hint
    found = processed(processor, {"hint": hint, "others": 5})
    assert (found["hint"], found["others"]) == ([ids], 5)


def test_there_may_be_several_hints(processors):
    processor = processors["token_recycling"]
    ids = processor.tokenizer.encode("a b", add_special_tokens=False)
    assert processed(processor, {"hint": ["a b", [7, 8], "a b"]})["hint"] == [ids, [7, 8], ids]


def test_a_prediction_of_openai_is_a_hint(processors):
    text, processor = "Tom has 3 apples.", processors["token_recycling"]
    parts = [{"type": "text", "text": part} for part in (text[:7], text[7:])]
    for content in (text, parts):
        prediction = {"type": "content", "content": content}
        chat = ChatCompletionRequest(messages=[], prediction=prediction)
        found = processed(processor, chat.to_sampling_params(60, {}).extra_args)
        assert found["hint"] == [processor.tokenizer.encode(text, add_special_tokens=False)]


def test_ouroboros_as_published_has_no_use_for_a_hint(processors):
    with pytest.raises(VLLMValidationError, match="none: the method ouroboros as published has no"):
        processed(processors["ouroboros"], {"hint": "a"})
    # As any other engine, it leaves a prediction unread.
    assert processed(processors["ouroboros"], {"prediction": "a"}) == {"prediction": "a"}


@pytest.mark.parametrize("name", ["token_recycling", "ouroboros", "ngram"])
@pytest.mark.parametrize(
    "extra_args",
    [
        None,
        {},
        {"hint": None, "prediction": None},
        {"speculate": False},
        {"circulate": 1, "specualte": 2, 4: 5},
    ],
)
def test_what_says_nothing_is_left_alone(name, extra_args, processors):
    assert processed(processors[name], extra_args) == extra_args


def test_other_methods_are_left_alone(processors):
    of_others = {"hint": 5, "speculate": "no"}
    assert processed(processors["ngram"], of_others) == of_others
