"""What a request says of speculation, its hints, its owner and its holes; no engine starts."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.tokenizers import cached_get_tokenizer
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine.input_processor import InputProcessor

from tests.integration.engines import GROWN, SMALL_OUROBOROS, TARGET, TRUNK
from vllm_recycle.core.owners import Owner
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.integration.requests import parameters as requests

METHODS = {
    "sequence": GROWN,
    "shared": {**GROWN, "scope": "shared"},
    "isolated": {**GROWN, "scope": "isolated"},
    "trunk": TRUNK,
    "published": SMALL_OUROBOROS,
    "request": {**SMALL_OUROBOROS, "scope": "request"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 2},
}
SECRET = requests.digest("salt")


@cache
def processor_of(method: str) -> InputProcessor:
    arguments = EngineArgs(TARGET, speculative_config=METHODS[method], max_model_len=64)
    return InputProcessor(arguments.create_engine_config())


def processed(method: str, extra_args: Any, salt: str | None = None) -> Any:
    """A request that reaches the engine."""
    prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": [5, 6]}
    prompt |= {} if salt is None else {"cache_salt": salt}
    params, tasks = SamplingParams(extra_args=extra_args), ("generate",)
    request = processor_of(method).process_inputs("0", prompt, params, supported_tasks=tasks)
    assert params.extra_args == extra_args  # the caller's
    return request


def ids_of(text: str) -> list[int]:
    return processor_of("sequence").tokenizer.encode(text, add_special_tokens=False)


BAD_EXTRA_ARGS = [
    ({"speculate": "no"}, "extra_args: 'speculate' is 'no', expected true or false"),
    ({"speculate": 2}, "extra_args: 'speculate' is 2, expected true or false"),
    *(
        ({"hint": hint}, f"'hint' is {re.escape(repr(hint))}, expected a text in UTF-8 or a list")
        for hint in (5, "\ud800", [7, 4096], [-1], [True])
    ),
    ({"hint": [[7], [4096]]}, r"'hint' is \[4096\], expected a text in UTF-8 or a list"),
    ({"hint": [[7] * 64, "a"]}, "expected at most the 64 tokens of max_model_len"),
    ({"hint": ["a"] * 65}, "expected at most 64 hints"),
    ({"hint": "a b " * 9999}, "expected at most the 64 tokens of max_model_len"),
    ({"hint": "a", "prediction": {}}, "'prediction' is {}, expected none beside 'hint'"),
    ({"prediction": "a"}, "'prediction' is 'a', expected {'type': 'content', 'content'"),
    ({"prediction": {"content": 5}}, "expected {'type': 'content', 'content': TEXT}"),
    ({"prediction": {"content": [{"text": 5}]}}, "expected {'type': 'content', 'content': TEXT"),
    *(
        ({"owner": name}, "'owner' is .*, expected an integer of 64 bits, or a text of 1 to 256")
        for name in ("", "a" * 257, 1 << 63, "\ud800", True, ["a", "salt"])
    ),
]


@pytest.mark.parametrize(
    ("method", "extra_args", "salt", "message"),
    [
        *(("sequence", extra_args, None, message) for extra_args, message in BAD_EXTRA_ARGS),
        ("shared", {"owner": "a"}, None, "with scope 'shared' has none"),
        ("isolated", {"owner": "a"}, None, "with scope 'isolated' has none"),
        ("published", {"owner": "a"}, None, "the method ouroboros with scope 'shared' has none"),
        ("published", {"hint": "a"}, None, "none: the method ouroboros as published has no"),
        ("sequence", None, "\ud800", r"'cache_salt' is '\*{3}', expected a text in UTF-8"),
        ("published", None, "salt", r"'cache_salt' is '\*{3}', expected none: all requests sh"),
    ],
)
def test_what_is_wrong_is_refused(method, extra_args, salt, message):
    with pytest.raises(VLLMValidationError, match=message):
        processed(method, extra_args, salt)


@pytest.mark.parametrize("method", ["sequence", "trunk"])
@pytest.mark.parametrize("hints", [[""], ["a b"], [[]], [[0, 4095]], ["a b", [7, 8], "a b"]])
def test_token_ids_reach_the_engine(hints, method):
    request = processed(method, {"hint": hints if len(hints) > 1 else hints[0], "others": 5})
    expected = [ids_of(hint) if isinstance(hint, str) else hint for hint in hints]
    found = request.sampling_params.extra_args
    assert found == {"hint": expected, "prediction": None, "others": 5}


def test_tokens_of_a_hint_that_the_model_does_not_have_are_holes(monkeypatch):
    ids = ids_of("Tom has 3 apples.")
    vocab_size = sorted(ids)[-1]  # the largest is not in it
    holes = [-1 if token == vocab_size else token for token in ids]
    config = processor_of("sequence").model_config
    monkeypatch.setattr(type(config), "get_vocab_size", lambda _: vocab_size)
    request = processed("sequence", {"hint": "Tom has 3 apples."})
    assert request.sampling_params.extra_args["hint"] == [holes]


def test_a_text_is_tokenized_in_pieces_up_to_a_limit(monkeypatch):
    text, lengths = "one two three four five six " * 4, []
    tokenizer = processor_of("sequence").tokenizer

    class Watched:
        def encode(self, piece: str, **given: Any) -> list[int]:
            lengths.append(len(piece))
            return tokenizer.encode(piece, **given)

    monkeypatch.setattr(requests, "PIECE", 28)
    whole = requests.to_token_ids(text, "hint", Watched(), 4096)
    assert tokenizer.decode(whole) == text
    assert lengths == [28] * 4
    part = requests.to_token_ids(text, "hint", Watched(), 4096, limit=len(whole) // 2 - 1)
    assert part == whole[: len(part)]
    assert lengths[4:] == [28] * 2


def test_a_prediction_that_is_left_unread_is_not_sent_to_the_engine():
    request = processed("request", {"prediction": {"content": "a"}, "others": 5})
    expected = {"hint": None, "prediction": None, "others": 5}
    assert request.sampling_params.extra_args == expected


def test_a_prediction_of_openai_is_a_hint():
    text = "Tom has 3 apples."
    parts = [{"type": "text", "text": part} for part in (text[:7], text[7:])]
    for content in (text, parts):
        prediction = {"type": "content", "content": content}
        chat = ChatCompletionRequest(messages=[], prediction=prediction)
        params = chat.to_sampling_params(60, {})
        assert text[:7] not in repr(params)  # which servers log
        request = processed("sequence", params.extra_args)
        assert request.sampling_params.extra_args["hint"] == [ids_of(text)]


NOTHING = [None, {}, {"hint": None, "prediction": None}, {"speculate": False}]
NOTHING += [{"circulate": 1, "specualte": 2, 4: 5}]


@pytest.mark.parametrize(
    ("method", "extra_args"),
    [
        *((method, none) for method in ("sequence", "isolated", "request") for none in NOTHING),
        ("shared", None),
        ("ngram", {"hint": 5, "speculate": "no"}),
    ],
)
def test_what_says_nothing_is_left_alone(method, extra_args):
    request = processed(method, extra_args, "salt")
    assert (request.sampling_params.extra_args, request.cache_salt) == (extra_args, "salt")


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
    assert requests.owner_of(processed("sequence", {"owner": owner}, salt)) == expected


@pytest.mark.parametrize("salt", [None, "salt"])
@pytest.mark.parametrize("owner", [None, "a"])
def test_a_session_is_an_owner_where_none_is_given(owner, salt):
    """Each part of its input comes as a request, which would leave the entries of the last one."""
    request = processed("sequence", {"owner": owner}, salt)
    owners = [requests.owner_of(request)]
    request.resumable = True
    owners.append(requests.owner_of(request))
    if owner is None and salt is None:
        assert owners == [None, Owner(request.request_id, is_session=True)]
        assert owners[1] != Owner(request.request_id)  # which a client could name
    else:
        assert owners[0] == owners[1]


@pytest.mark.parametrize("name", [["a", "salt"], 1.5, "", True, {}, "\ud800"])
def test_what_no_frontend_has_checked_is_nobodys(name):
    request = processed("sequence", {"owner": "a"})
    request.sampling_params.extra_args = {"owner": name, "hint": [name, 5]}
    assert requests.owner_of(request) is None
    assert new_request(request.sampling_params).hint == []


def new_request(params: SamplingParams, owner: Owner | None = None) -> NewRequest:
    model_config = processor_of("sequence").model_config
    return requests.new_request(0, [1, 2], params, owner, model_config)


VOCAB_SIZE = json.loads((Path(TARGET) / "config.json").read_text())["vocab_size"]
NO_HINTS = ["a", ["a"], [5], [["a"]], [[None]], [[True]], [[5.0]], [[[5]]]]
NO_HINTS += [[[VOCAB_SIZE]], [[1 << 31]], [[-2]], [[5], [5] * 64], [[5], "a"], [[]] * 65]


@pytest.mark.parametrize("hint", NO_HINTS)
def test_what_no_frontend_has_checked_and_is_no_hint_counts_as_none(hint):
    assert new_request(SamplingParams(extra_args={"hint": hint})).hint == []


def test_a_hint_follows_the_text():
    last = VOCAB_SIZE - 1
    hint = new_request(SamplingParams(extra_args={"hint": [[last, -1], [7] * 62]})).hint
    assert hint == [-1, 1, 2, last, -1, -1, 1, 2, *[7] * 62]


@pytest.mark.parametrize(
    ("max_tokens", "speculate", "has_drafts"),
    [(2, True, True), (1, True, False), (2, False, False)],
)
def test_the_text_of_what_gets_no_drafts_is_for_its_owner(max_tokens, speculate, has_drafts):
    extra_args = {"hint": [[7]], "speculate": speculate}
    params = SamplingParams(max_tokens=max_tokens, extra_args=extra_args)
    for owner in (None, Owner("a")):
        request = new_request(params, owner)
        assert request.teaches == (has_drafts or owner is not None)
        assert len(request.hint) == (4 if has_drafts else 0)


@pytest.mark.parametrize(
    ("said", "expected"), [*((said, True) for said in (True, 1, None)), (False, False), (0, False)]
)
def test_which_requests_have_drafts(said, expected):
    params = SamplingParams(extra_args={"speculate": said})
    assert requests.may_speculate(params) == expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"thinking_token_budget": 0}, True),
        ({"bad_words": ["no"]}, True),
        ({"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}, False),
        ({"min_tokens": 3, "logit_bias": {5: 1.0}, "min_p": 0.1, "stop": ["no"]}, False),
    ],
)
def test_which_requests_look_back_on_their_output(params, expected):
    params = SamplingParams(**params)
    params.update_from_tokenizer(cached_get_tokenizer(TARGET))
    assert requests.looks_back(params) == expected


def test_where_the_input_of_a_request_is_no_token():
    def text(*, is_encoder_decoder: bool = False) -> list[int]:
        return [*requests.with_holes([*known, 7], request, is_encoder_decoder=is_encoder_decoder)]

    known = [5, 9, 9, 6, 9]
    request = NewRequestData("0", known, [], None, None, ([0],), 0, None)
    assert text() == [5, 9, 9, 6, 9, 7]
    places = (PlaceholderRange(1, 2), PlaceholderRange(4, 1))
    request.mm_features = [MultiModalFeatureSpec(None, "image", "", place) for place in places]
    assert text() == [5, -1, -1, 6, -1, 7]
    assert text(is_encoder_decoder=True) == [5, 9, 9, 6, 9, 7]
    request.prompt_is_token_ids = [False] + [True] * 4
    assert text() == [-1, -1, -1, 6, -1, 7]
    request.prompt_token_ids, request.prompt_embeds = None, torch.zeros(5, 8)
    assert text() == [-1, -1, -1, -1, -1, 7]
