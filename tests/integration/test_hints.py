"""Hints of requests, and texts for all: drafts come from them, outputs tell nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
from engines import (
    GROWN,
    SMALL_OUROBOROS,
    TARGET,
    TRUNK,
    core,
    counter,
    engine,
    generate,
    mixed_params,
    read_prompts,
    runner,
    watch_steps,
    with_hint,
)
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from vllm_recycle.core.adjacency import MAX_CONTEXT
from vllm_recycle.integration.plugin import register

PROMPTS = read_prompts(6, max_words=60)
PARAMS = mixed_params(len(PROMPTS), max_tokens=60)
SCARCE = {
    "preemption": {"block_size": 32, "num_gpu_blocks_override": 17, "max_model_len": 384},
    "prefix hits and prompts in parts": {
        "block_size": 32,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 96,
    },
}


@pytest.fixture(scope="module")
def expected() -> list[list[tuple[int, ...]]]:
    with engine() as llm:
        return generate(llm, PROMPTS, PARAMS)


def hints_of(llm: Any, outputs: list[list[tuple[int, ...]]]) -> dict[str, list[Any]]:
    """Hints of each request, by what they are: none, its answer, that of another one."""
    answers = [list(output) for (output,) in outputs]
    texts = [llm.get_tokenizer().decode(answer) for answer in answers]
    return {"none": [], "ids": answers, "text": texts, "wrong": texts[1:] + texts[:1]}


def hinted(hints: list[Any]) -> list[SamplingParams]:
    pairs = zip(PARAMS, hints, strict=True) if hints else ()
    return [with_hint(params, hint) for params, hint in pairs] or PARAMS


@pytest.mark.parametrize(
    "scope", ["isolated", "sequence", pytest.param("shared", marks=pytest.mark.slow)]
)
def test_a_hint_makes_it_fewer_steps_and_leaves_the_output_as_it_is(scope, expected):
    with engine({**GROWN, "scope": scope}) as llm:
        steps, counts = watch_steps(llm), {}
        for name, hints in [*hints_of(llm, expected).items(), ("none again", [])]:
            if scope != "isolated":
                runner(llm).tree_drafter.reset()
            steps.clear()
            assert generate(llm, PROMPTS, hinted(hints)) == expected
            counts[name] = sum(len(step.num_scheduled_tokens) for step in steps)
    # Else by other salts, which lead to other slots.
    assert counts["none again"] == counts["none"] or scope != "isolated"
    assert counts["ids"] < counts["none"] / 2
    assert counts["text"] < counts["none"] / 2


@pytest.mark.parametrize("name", SCARCE)
def test_a_hint_is_taken_in_whenever_its_request_begins(name, expected):
    with engine(GROWN, **SCARCE[name]) as llm:
        drafter, texts, hints = runner(llm).tree_drafter, [], hints_of(llm, expected)["ids"]
        begin, take_in = drafter.begin, drafter.take_in
        drafter.begin = lambda *args: texts.append(args[1].tolist()) or begin(*args)
        drafter.take_in = lambda *args: texts.append(args[0]) or take_in(*args)
        for _ in range(2):
            assert generate(llm, PROMPTS, hinted(hints)) == expected
        begun = 2 * len(PROMPTS) + counter(llm, "num_preemptions")
        assert (begun > 2 * len(PROMPTS)) == (name == "preemption")
        assert (counter(llm, "prefix_cache_hits") > 0) == (name != "preemption")
    assert len(texts) == 2 * begun
    for known, text in zip(texts[::2], texts[1::2], strict=True):
        assert text[:MAX_CONTEXT] == known[-MAX_CONTEXT:]
        assert text[MAX_CONTEXT:] in hints


def test_a_prediction_of_openai_is_a_hint(expected):
    with engine({**GROWN, "scope": "isolated"}) as llm:
        text, steps = hints_of(llm, expected)["text"][0], watch_steps(llm)
        parts = [{"type": "text", "text": part} for part in (text[:20], text[20:])]
        counts = []
        for content in (None, text, parts):
            chat: dict[str, Any] = {"messages": [], "temperature": 0, "ignore_eos": True}
            if content is not None:
                chat["prediction"] = {"type": "content", "content": content}
            params = ChatCompletionRequest(**chat).to_sampling_params(60, {})
            steps.clear()
            assert generate(llm, PROMPTS[:1], params) == expected[:1]
            counts.append(len(steps))
    assert counts[1] == counts[2] < counts[0] / 2


def test_texts_are_learnt_for_all():
    with engine(GROWN) as llm:
        steps, drafter = watch_steps(llm), runner(llm).tree_drafter
        greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        ((answer,),) = generate(llm, PROMPTS[:1], greedy)
        cold = len(steps)
        drafter.reset()
        text, ids = PROMPTS[1], llm.get_tokenizer().encode(PROMPTS[0])
        num_tokens = len(llm.get_tokenizer().encode(text, add_special_tokens=False))
        texts = [text, [*ids, *answer]]
        assert llm.collective_rpc("learn_texts", args=(texts,)) == [num_tokens + len(texts[1])]
        learnt = drafter.state.matrix.num_written
        with pytest.raises(ValueError, match="'text 2 of learn_texts' is 5, expected a text or"):
            llm.collective_rpc("learn_texts", args=([text, 5],))
        with pytest.raises(ValueError, match="got 'text', expected a list of texts"):
            llm.collective_rpc("learn_texts", args=("text",))
        assert drafter.state.matrix.num_written == learnt
        steps.clear()
        assert generate(llm, PROMPTS[:1], greedy) == [[answer]]
        assert len(steps) < cold / 2


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({**GROWN, "scope": "isolated"}, "scope is 'isolated', expected one with shared entries"),
        pytest.param(
            SMALL_OUROBOROS, "the method ouroboros takes in no texts", marks=pytest.mark.slow
        ),
    ],
)
def test_texts_for_all_are_refused_where_nothing_is_shared(method, message):
    with engine(method) as llm, pytest.raises(ValueError, match=message):
        core(llm).collective_rpc("learn_texts", args=([PROMPTS[0]],))


# What is accepted, without an engine.


@pytest.fixture(scope="module")
def processors() -> dict[str, InputProcessor]:
    register()
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    methods = {"token_recycling": GROWN, "ouroboros": SMALL_OUROBOROS, "ngram": ngram}
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
        ({"hint": 5}, "'hint' is 5, expected a text or a list of token ids from 0 to 4095"),
        ({"hint": ["a"]}, r"'hint' is \['a'\], expected a text or a list"),
        ({"hint": [7, 4096]}, r"'hint' is \[7, 4096\], expected a text or a list"),
        ({"hint": [-1]}, r"'hint' is \[-1\], expected a text or a list"),
        ({"hint": [True]}, r"'hint' is \[True\], expected a text or a list"),
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
def test_what_is_no_hint_is_refused(extra_args, message, processors):
    with pytest.raises(VLLMValidationError, match=message):
        processed(processors["token_recycling"], extra_args)


@pytest.mark.parametrize("name", ["token_recycling", "trunk"])
@pytest.mark.parametrize("hint", ["", "a b", [], [0, 4095]])
def test_token_ids_reach_the_engine(hint, name, processors):
    processor = processors[name]
    ids = processor.tokenizer.encode(hint, add_special_tokens=False) if hint == str(hint) else hint
    found = processed(processor, {"hint": hint, "others": 5})
    assert (found["hint"], found["others"]) == (ids, 5)


def test_ouroboros_as_published_has_no_use_for_a_hint(processors):
    with pytest.raises(VLLMValidationError, match="none: the method ouroboros as published has no"):
        processed(processors["ouroboros"], {"hint": "a"})
    # As any other engine, it leaves a prediction unread.
    assert processed(processors["ouroboros"], {"prediction": "a"}) == {"prediction": "a"}


@pytest.mark.parametrize("name", ["token_recycling", "ouroboros", "ngram"])
@pytest.mark.parametrize("extra_args", [None, {}, {"hint": None, "prediction": None}, {"other": 5}])
def test_what_says_nothing_is_left_alone(name, extra_args, processors):
    assert processed(processors[name], extra_args) == extra_args


def test_other_methods_are_left_alone(processors):
    of_others = {"hint": 5, "speculate": "no"}
    assert processed(processors["ngram"], of_others) == of_others
