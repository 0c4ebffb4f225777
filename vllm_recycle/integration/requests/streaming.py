"""Streams of a server that parses tool calls or reasoning: a parser reads the tokens one by one.

vLLM's parsers are written for the deltas of plain decoding, and some lose or repeat arguments where
a delta has several tokens (examples/tool_parsers.md). So a delta remembers the text of each of its
tokens, as vLLM's detokenizer gave it, and is split before a parser sees it. Behind the parser, the
messages of `stream_interval` tokens are one chunk again. `requests.shims` puts this into the
server.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from vllm_recycle.integration.requests.parameters import is_ours
from vllm_recycle.integration.start.versions import FEATURES

TEXTS = ("content", "reasoning")  # of vLLM's `DeltaMessage`


class Delta(str):
    """The text of a delta, which remembers that of each token, also where deltas pile up."""

    texts: tuple[str, ...]
    parse: Callable[..., Any] | None = None  # a server's parser, once it has read this text

    @classmethod
    def of(cls, texts: Sequence[str]) -> Delta:
        delta = cls("".join(texts))
        delta.texts = tuple(texts)
        return delta

    def __add__(self, text: str) -> Delta:
        if isinstance(text, Delta):
            return Delta.of(self.texts + text.texts)
        return Delta.of((*self.texts[:-1], self.texts[-1] + text))  # an end without a token


class ParsedText(str):
    """The text of a chunk that a server's parser has read, and the parser's message."""

    message: Any  # vLLM's `DeltaMessage`, or None


class Detokenizer:
    """vLLM's detokenizer of a streaming request, which it drives token by token.

    A token whose text is held back, as in the middle of a character or where a stop string may
    have begun, has an empty one. What follows a stop string is never detokenized.
    """

    def __init__(self, detokenizer: Any) -> None:
        self._detokenizer = detokenizer
        self._texts: list[str] = []  # of tokens that are not sent yet, without the last
        self._has_last = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._detokenizer, name)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """As vLLM's, for all tokens of a step: the stop string that was found, if any."""
        for number, token_id in enumerate(new_token_ids, start=1):
            if self._has_last:
                self._texts.append(self._detokenizer.get_next_output_text(False, True))
            self._has_last = True
            ends = stop_terminated and number == len(new_token_ids)
            if (stop_string := self._detokenizer.update([token_id], ends)) is not None:
                if not FEATURES.trims_surplus_tokens:
                    del new_token_ids[number:]
                return stop_string
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """As vLLM's, but a `Delta` where there are tokens to send."""
        text = self._detokenizer.get_next_output_text(finished, delta)
        if not self._has_last:
            return text
        texts, self._texts, self._has_last = [*self._texts, text], [], False
        return Delta.of(texts)


def by_token(server: Any, parser: Any, request: Any, stream: AsyncIterator[Any]) -> Any:
    """What a request is answered from, split where the server parses for an engine of ours."""
    config = server.engine_client.vllm_config
    if parser is None or not is_ours(config.speculative_config):
        return stream
    interval = config.scheduler_config.stream_interval
    return _split_stream(stream, max(interval, getattr(request, "stream_interval", None) or 1))


async def _split_stream(stream: AsyncIterator[Any], interval: int) -> AsyncIterator[Any]:
    parsers: dict[int, Callable[..., Any]] = {}
    async for item in stream:
        if hasattr(item, "outputs"):
            for result in split(item, parsers, interval):
                yield result
        else:  # the Responses API's context of a request
            for result in split(item.last_output, parsers, interval):
                item.last_output = result
                yield item


def parse_delta(
    original: Any,
    parser: Any,
    delta_text: str,
    delta_token_ids: list[int],
    request: Any,
    prompt_token_ids: list[int] | None = None,
    *,
    finished: bool,
) -> Any:
    """As vLLM's, which `original` is: a server's call, which tells `split` of the parser."""
    if isinstance(delta_text, ParsedText):
        return delta_text.message
    parser_kwargs = {"request": request, "prompt_token_ids": prompt_token_ids}
    if isinstance(delta_text, Delta):
        delta_text.parse = functools.partial(original, parser, **parser_kwargs)
    return original(parser, delta_text, delta_token_ids, **parser_kwargs, finished=finished)


def split(result: Any, parsers: dict[int, Callable[..., Any]], interval: int) -> Iterator[Any]:
    """From vLLM's `RequestOutput` of a step to one for each choice and chunk.

    Args:
        result: of a step, or of several that have piled up.
        parsers: of the choices, by index. Where chunks may have several tokens, a parser enters
            when it has read its first one.
        interval: tokens that a chunk has at least, as far as the step and the kinds of messages
            allow. Without a parser each chunk has one token.

    """
    for completion in result.outputs:
        is_split = len(getattr(completion.text, "texts", ())) > 1
        for chunk in _chunks(completion, parsers, interval) if is_split else (completion,):
            part = copy.copy(result)
            part.outputs = [chunk]
            yield part
            if interval > 1 and (parse := getattr(chunk.text, "parse", None)) is not None:
                parsers[chunk.index] = parse


def _chunks(
    completion: Any, parsers: dict[int, Callable[..., Any]], interval: int
) -> Iterator[Any]:
    texts, start, message = completion.text.texts, 0, None
    while start < len(texts) and completion.index not in parsers:
        yield _chunk(completion, Delta.of(texts[start : start + 1]), start, start + 1)
        start += 1
    for place in range(start, len(texts)):
        next_message = parsers[completion.index](
            delta_text=texts[place],
            delta_token_ids=[*completion.token_ids[place : place + 1]],
            finished=completion.finish_reason is not None and place == len(texts) - 1,
        )
        is_full = interval <= min(place - start, len(texts) - place)
        if place > start and (is_full or not _continues(message, next_message)):
            yield _chunk(completion, _parsed(texts[start:place], message), start, place)
            start, message = place, next_message
        else:
            message = _join(message, next_message)
    if start < len(texts):
        yield _chunk(completion, _parsed(texts[start:], message), start, len(texts))


def _parsed(texts: Sequence[str], message: Any) -> ParsedText:
    text = ParsedText("".join(texts))
    text.message = message
    return text


def _chunk(completion: Any, text: str, start: int, end: int) -> Any:
    ends = end == len(completion.text.texts)
    tokens, logprobs = slice(start, end), completion.logprobs
    return dataclasses.replace(
        completion,
        text=text,
        token_ids=completion.token_ids[tokens],
        logprobs=None if logprobs is None else logprobs[tokens],
        finish_reason=completion.finish_reason if ends else None,
        stop_reason=completion.stop_reason if ends else None,
    )


def _kinds(message: Any) -> list[Any]:
    """What a parser's message brings: names of fields, and the index of each tool call."""
    if message is None:
        return []
    fields = [name for name, value in message if value and name != "tool_calls"]
    return fields + [call.index for call in message.tool_calls]


def _continues(message: Any, next_message: Any) -> bool:
    """Whether both messages can be one: of several kinds, a client would not know the order."""
    kinds, next_kinds = _kinds(message), _kinds(next_message)
    if not kinds or not next_kinds:
        return True
    if kinds != next_kinds or len(kinds) > 1:
        return False
    if not message.tool_calls:
        return kinds[0] in TEXTS
    call, next_call = message.tool_calls[0], next_message.tool_calls[0]
    is_start = next_call.id or not next_call.function or next_call.function.name
    return bool(call.function) and not is_start


def _join(message: Any, next_message: Any) -> Any:
    """The message with what a later one adds to it, where that continues it."""
    if not _kinds(message):
        return message if next_message is None else next_message
    if not _kinds(next_message):
        return message
    for name in TEXTS:
        if text := getattr(next_message, name):
            setattr(message, name, getattr(message, name) + text)
    for call, next_call in zip(message.tool_calls, next_message.tool_calls, strict=True):
        arguments = (call.function.arguments or "", next_call.function.arguments or "")
        call.function.arguments = "".join(arguments)
    return message
