"""Streams of a server that parses tool calls or reasoning: a step's tokens are sent one by one.

vLLM's parsers are written for the deltas of plain decoding, and some lose or repeat arguments where
a delta has several tokens (examples/tool_parsers.md). So a delta remembers the text of each of its
tokens, as vLLM's detokenizer gave it, and is split before a parser sees it: the chunks that a
client receives are those of plain decoding. `request_shims` puts this into the server.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from vllm_recycle.integration.requests import is_ours
from vllm_recycle.integration.versions import FEATURES


class Delta(str):
    """The text of a delta, which remembers that of each token, also where deltas pile up."""

    texts: tuple[str, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> Delta:
        delta = cls("".join(texts))
        delta.texts = tuple(texts)
        return delta

    def __add__(self, other: str) -> Delta:
        if isinstance(other, Delta):
            return Delta.of(self.texts + other.texts)
        return Delta.of((*self.texts[:-1], self.texts[-1] + other))  # an end without a token


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


def by_token(server: Any, parser: Any, stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """What a request is answered from, split where the server parses for an engine of ours."""
    if parser is None or not is_ours(server.engine_client.vllm_config.speculative_config):
        return stream
    return _split_stream(stream)


async def _split_stream(stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for item in stream:
        if hasattr(item, "outputs"):
            for result in split(item):
                yield result
        else:  # the Responses API's context of a request
            for result in split(item.last_output):
                item.last_output = result
                yield item


def split(result: Any) -> Iterator[Any]:
    """From vLLM's `RequestOutput` of a step to one for each choice and token."""
    for completion in result.outputs:
        texts = getattr(completion.text, "texts", (completion.text,))
        for index in range(len(texts)):
            one = copy.copy(result)
            one.outputs = [_of_token(completion, texts, index) if len(texts) > 1 else completion]
            yield one


def _of_token(completion: Any, texts: Sequence[str], index: int) -> Any:
    ends = index == len(texts) - 1
    only, logprobs = slice(index, index + 1), completion.logprobs
    return dataclasses.replace(
        completion,
        text=texts[index],
        token_ids=completion.token_ids[only],
        logprobs=None if logprobs is None else logprobs[only],
        finish_reason=completion.finish_reason if ends else None,
        stop_reason=completion.stop_reason if ends else None,
    )
