"""Streamed tool calls and reasoning of a server with speculation are those of a server without."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import anthropic
import pytest

from tests.integration.engines import EXAMPLES
from tests.integration.server.servers import Server

pytestmark = pytest.mark.slow

TEXTS = json.loads((EXAMPLES / "benchmarks" / "tool_parsers.json").read_text(encoding="utf-8"))
TYPES = {"city": {"type": "string"}, "days": {"type": "integer"}}
NAME = "get_weather"
PARAMETERS = {"type": "object", "properties": TYPES}
IN_REASONING = ["--structured-outputs-config.enable_in_reasoning", "true"]
# With the flags of each, beside its name.
PARSERS = {"xlam": [], "pythonic": ["--reasoning-parser", "qwen3", *IN_REASONING]}
CITIES = ("Rome", "Oslo", "Lima")
GREEDY = {"model": "target", "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def servers(request, tmp_path_factory) -> Iterator[tuple[str, Server, Server]]:
    """The name of the parser; a server without speculation, and one with it."""
    folder = tmp_path_factory.mktemp("servers")
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", request.param]
    flags += PARSERS[request.param]
    method = ["--speculative-config", json.dumps({"method": "token_recycling", "row_cost": 0})]
    plain = Server(folder / "plain.log", *flags, forks=True)
    ours = Server(folder / "ours.log", *flags, *method, forks=True)
    try:
        plain.wait_until_healthy()
        ours.wait_until_healthy()
        yield request.param, plain, ours
    finally:
        plain.kill()
        ours.kill()


def question(parser: str, city: str) -> tuple[str, str]:
    """A question with an answer as the parser's models write it, and a regex of such answers.

    Drafts are long then, since prompts are learnt from.
    """
    [text] = TEXTS["tool_parsers"][parser][:1]
    if PARSERS[parser]:
        text = TEXTS["reasoning_parsers"]["qwen3"][0].replace("\n\nThe answer is 7 < 9.", text)
    regex = re.sub(r"([][(){}.?])", r"\\\1", text)
    regex = regex.replace("Paris", "[A-Z][a-z]{3,9}").replace("1", "[1-9]")
    return f"Paris\n{text}\n{city}", regex


def joined(parts: Iterable[tuple[str, str | None]]) -> list[tuple[str, str]]:
    """What comes in parts, as one where the parts are of one kind and follow each other."""
    parts = [(kind, text) for kind, text in parts if text]
    return [(kind, "".join(map(itemgetter(1), of))) for kind, of in groupby(parts, itemgetter(0))]


def chat(
    server: Server, parser: str, city: str, *, interval: int = 1
) -> tuple[list[Any], list[list[Any]]]:
    """What a client receives, and of each chunk its tokens."""
    content, regex = question(parser, city)
    stream = server.client.chat.completions.create(
        messages=[{"role": "user", "content": content}],
        tools=[{"type": "function", "function": {"name": NAME, "parameters": PARAMETERS}}],
        max_tokens=200,
        logprobs=True,
        extra_body={
            "structured_outputs": {"regex": regex},
            "return_token_ids": True,
            "stream_interval": interval,
        },
        **GREEDY,
    )
    parts, tokens = [], []
    for chunk in stream:
        [choice] = chunk.choices
        delta = choice.delta
        parts += [(kind, getattr(delta, kind, None)) for kind in ("content", "reasoning")]
        for call in delta.tool_calls or []:
            parts.append((f"name {call.index}", call.function.name))
            parts.append((f"arguments {call.index}", call.function.arguments))
        parts.append(("finish", choice.finish_reason))
        if token_ids := getattr(choice, "token_ids", None):
            texts = [entry.token for entry in choice.logprobs.content]
            tokens.append([*zip(token_ids, texts, strict=True)])
    return joined(parts), tokens


def respond(server: Server, parser: str, city: str) -> list[Any]:
    """What a client of the Responses API receives."""
    content, regex = question(parser, city)
    stream = server.client.responses.create(
        input=content,
        tools=[{"type": "function", "name": NAME, "parameters": PARAMETERS}],
        max_output_tokens=200,
        extra_body={"structured_outputs": {"regex": regex}},
        **GREEDY,
    )
    parts = []
    for event in stream:
        parts.append((event.type, event.delta if hasattr(event, "delta") else event.type))
    items = event.response.output
    return [*joined(parts), *(item.model_dump(exclude={"id", "call_id"}) for item in items)]


def message(server: Server, parser: str, city: str) -> list[Any]:
    """What a client of Anthropic's Messages API receives, which knows no regex but schemas."""
    call = {
        "name": {"const": NAME},
        "arguments": {
            **PARAMETERS,
            "properties": {**TYPES, "city": {"type": "string", "pattern": "^[A-Z][a-z]{3,9}$"}},
            "required": [*TYPES],
            "additionalProperties": False,
        },
    }
    items = {"type": "object", "properties": call, "required": [*call]}
    schema = {"type": "array", "minItems": 1, "maxItems": 1, "items": items}
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    stream = client.messages.create(
        messages=[{"role": "user", "content": question(parser, city)[0]}],
        tools=[{"name": NAME, "input_schema": PARAMETERS}],
        max_tokens=200,
        model="target",
        stream=True,
        extra_body={
            "temperature": 0,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
    )
    parts = []
    for event in stream:
        if event.type == "content_block_delta":
            delta = event.delta
            parts.append((delta.type, getattr(delta, "partial_json", getattr(delta, "text", ""))))
        elif event.type == "content_block_start":
            parts.append((event.type, f"{event.content_block.type} {event.index}"))
        elif event.type == "message_delta":
            parts.append((event.type, event.delta.stop_reason))
    return joined(parts)


def of_plain_decoding(client: Callable[..., Any], server: Server, *question: str) -> Any:
    """What the server gives twice: on a busy machine tokens of two steps may share a delta."""
    received: list[Any] = []
    while (latest := client(server, *question)) not in received:
        received.append(latest)
    return latest


def of_parsers(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("servers", names, indirect=True, scope="module")


@of_parsers(*PARSERS)
def test_chat(servers):
    parser, plain, ours = servers
    for city in CITIES:
        expected, plain_tokens = of_plain_decoding(chat, plain, parser, city)
        received, tokens = chat(ours, parser, city)
        in_chunks, chunks = chat(ours, parser, city, interval=16)
        assert received == in_chunks == expected
        call = dict(received)
        assert call["name 0"] == NAME
        assert json.loads(call["arguments 0"]).keys() == TYPES.keys()
        assert ("reasoning" in call) == (parser == "pythonic")
        flat = [*chain(*plain_tokens)]
        assert tokens == [[token] for token in flat]
        assert [*chain(*chunks)] == flat
        assert 3 * len(chunks) < len(plain_tokens)
    drafts, accepted = (
        ours.counter(f"spec_decode_num_{what}_total") for what in ("drafts", "accepted_tokens")
    )
    assert accepted > 2 * drafts, "expected long steps"


@of_parsers(*PARSERS)
def test_responses(servers):
    parser, plain, ours = servers
    for city in CITIES:
        expected = of_plain_decoding(respond, plain, parser, city)
        assert expected[-1]["name"] == NAME
        assert respond(ours, parser, city) == expected


@of_parsers("xlam")
def test_messages(servers):
    parser, plain, ours = servers
    for city in CITIES:
        expected = of_plain_decoding(message, plain, parser, city)
        assert "input_json_delta" in dict(expected)
        assert message(ours, parser, city) == expected


@of_parsers("xlam")
def test_aborting_in_mid_stream_leaves_nothing_running(servers):
    _, _, server = servers
    messages = [{"role": "user", "content": "Count."}]
    endless = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    stream = server.client.chat.completions.create(messages=messages, **endless, **GREEDY)
    next(iter(stream))
    stream.close()
    server.wait_until_idle()
