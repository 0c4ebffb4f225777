"""Grammars in the worker, which go ahead of the texts that follow them while drafts grow.

The scheduler has the grammar of a request, in another process. Here it is compiled once more, in
the background: drafts grow without it till then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_recycle.core.grammar import Allowed
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.drafter import from_all_ranks
from vllm_recycle.integration.schedule.grammar import ALL_ALLOWED

logger = init_logger("vllm.recycle")
# Rows of a draft that a grammar is asked at. Where it allows few tokens, so many at most, it
# expects one of them.
MOST_ROWS, FEW = 16, 16
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of some vocabularies
CANNOT_COME_BACK = "lm-format-enforcer"  # of vLLM's backends


class GrammarsAhead:
    """Those of the requests of a worker.

    Args:
        vllm_config: vLLM's.
        waits: whether a draft waits for its grammar. Else it tells how busy the compiler was.

    """

    def __init__(self, vllm_config: Any, *, waits: bool) -> None:
        self.vllm_config, self.waits = vllm_config, waits
        self.manager: StructuredOutputManager | None = None  # made for the first grammar
        self.compiler = ThreadPoolExecutor(1, "vllm-recycle-grammar", use_all_cores)
        self.compiling: dict[str, Future[GrammarAhead]] = {}
        self.compiled: dict[str, GrammarAhead] = {}

    def begin(self, request_id: str, params: Any) -> None:
        """A request starts, or goes on after it was preempted, with these sampling parameters."""
        structured = StructuredOutputRequest.from_sampling_params(params)
        if structured is None or structured.params._backend == CANNOT_COME_BACK:
            return
        if request_id not in self.compiling and request_id not in self.compiled:
            request = SimpleNamespace(
                request_id=request_id, sampling_params=params, structured_output_request=structured
            )
            self.compiling[request_id] = self.compiler.submit(self._compile, request)

    def end(self, request_ids: Iterable[str]) -> None:
        """Requests finished; their grammars go."""
        for request_id in request_ids:
            if future := self.compiling.pop(request_id, None):
                future.cancel()
            self.compiled.pop(request_id, None)

    def follow(self, texts: Mapping[str, Sequence[int]]) -> dict[str, GrammarAhead]:
        """Take in what texts have more than the last time; the grammars that are compiled.

        A grammar that cannot be compiled here is one that drafts grow without.

        Args:
            texts: by request, the tokens that its grammar is to take, all of them each time.

        """
        futures = {name: self.compiling[name] for name in texts if name in self.compiling}
        if futures:
            self._take_compiled(futures)
        grammars = {name: self.compiled[name] for name in texts if name in self.compiled}
        for name, grammar in grammars.items():
            grammar.follow(texts[name])
        return grammars

    def _take_compiled(self, futures: Mapping[str, Future[GrammarAhead]]) -> None:
        """Take those of some grammars that each rank has compiled, since ranks draft alike."""
        ended_ids = [req_id for req_id, future in futures.items() if self.waits or future.done()]
        has_failed = {req_id: futures[req_id].exception() is not None for req_id in ended_ids}
        failures_by_rank = from_all_ranks(has_failed)
        for req_id in ended_ids:
            if not all(req_id in failures for failures in failures_by_rank):
                continue
            future = self.compiling.pop(req_id)
            if not any(failures[req_id] for failures in failures_by_rank):
                self.compiled[req_id] = future.result()
            elif has_failed[req_id]:
                error = future.exception()
                logger.warning("drafts grow without the grammar of request %s: %r", req_id, error)

    def _compile(self, request: Any) -> GrammarAhead:
        """In a thread of its own: what vLLM's scheduler does for a request."""
        if self.manager is None:
            self.manager = StructuredOutputManager(self.vllm_config)
        self.manager.grammar_init(request)
        grammar = request.structured_output_request._grammar
        if isinstance(grammar, Future):
            grammar = grammar.result()
        return GrammarAhead(grammar, self.manager)


class GrammarAhead:
    """The grammar of a request, which goes ahead of its text and comes back; see `grammar.Grammar`.

    Where few tokens are allowed it expects one of them. Most often these are the beginnings of one
    text that has to follow, a key of a JSON schema, say, in which any white space is allowed and
    which can be cut into tokens in several ways: of these a model takes the longest, as its
    tokenizer does. But what came the last time that the same tokens were allowed comes first.

    Args:
        grammar: vLLM's `StructuredOutputGrammar`.
        manager: vLLM's `StructuredOutputManager`.

    """

    def __init__(self, grammar: Any, manager: Any) -> None:
        self.grammar, self.tokenizer = grammar, manager.tokenizer
        self.masks = manager.backend.allocate_token_bitmask(MOST_ROWS)
        # Outlines comes back from no more.
        self.longest = manager.vllm_config.num_speculative_tokens
        self.num_followed = 0  # tokens of the text
        self.is_lost = False  # the text is none of the grammar
        self.tokens_ahead: list[int] = []  # tokens that the grammar has taken ahead of the text
        self.seen: dict[tuple[int, ...], Allowed] = {}  # at the rows of the last draft
        self.habits: dict[tuple[int, ...], int] = {}  # what came where these were allowed

    def follow(self, text: Sequence[int]) -> None:
        """Take in what a text has more than the last time."""
        self._go([])
        token_ids = text[self.num_followed :]
        self.num_followed = len(text)
        for place, token in enumerate(token_ids):
            # Where it was not asked, there are no habits: at most places of a long text.
            seen = self.seen.get(tuple(token_ids[:place])) if self.seen else None
            if seen and (few_ids := _few(seen.words)):
                self.habits[few_ids] = token
            self.is_lost = self.is_lost or not self._take(token)
        self.seen.clear()

    def allowed(self, path: Sequence[int]) -> Allowed | None:
        """See `grammar.Grammar`; of too many rows nothing is said, and nothing behind an end."""
        key = tuple(path)
        if key not in self.seen:
            if self.is_lost or len(self.seen) == MOST_ROWS or not self._go(path):
                return None
            words = self.masks[len(self.seen)].fill_(ALL_ALLOWED)
            self.grammar.fill_bitmask(self.masks, len(self.seen))
            self.seen[key] = Allowed(words, self._expected(_few(words)))
        return self.seen[key]

    def _expected(self, ids: tuple[int, ...]) -> int:
        if not ids or ids in self.habits:
            return self.habits.get(ids, NO_TOKEN)
        tokens = [token for token in ids if token < len(self.tokenizer)]  # a mask has whole words
        texts = self.tokenizer.convert_ids_to_tokens(tokens)
        return longest_of(dict(zip(tokens, texts, strict=True)))

    def _go(self, path: Sequence[int]) -> bool:
        """Bring the grammar behind these tokens; whether it is there, and something may follow."""
        while self.tokens_ahead != [*path[: len(self.tokens_ahead)]]:
            self.grammar.rollback(1)  # what accepts one token takes back one
            self.tokens_ahead.pop()
        if len(path) > self.longest:
            return False
        for token in path[len(self.tokens_ahead) :]:
            if not self._take(token):
                return False
            self.tokens_ahead.append(token)
        return not self.grammar.is_terminated()

    def _take(self, token: int) -> bool:
        """Go on by a token, if it is allowed: llguidance comes back from no other."""
        grammar = self.grammar
        is_allowed = not grammar.is_terminated() and grammar.validate_tokens([token]) == [token]
        return is_allowed and grammar.accept_tokens("", [token])


def use_all_cores() -> None:
    """Let this thread run where any of its process may: vLLM binds the first to a single core."""
    cores = set[int]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that ends meanwhile
            cores |= os.sched_getaffinity(int(task.name))
    with suppress(OSError):
        os.sched_setaffinity(0, cores)


def longest_of(texts: Mapping[int, str | bytes]) -> int:
    """The token with the longest text, if it begins with those of all others; else -1.

    It is -1, too, of a tokenizer whose tokens are bytes.
    """
    strings = {token: text for token, text in texts.items() if isinstance(text, str)}
    if len(strings) < len(texts):
        return NO_TOKEN
    candidates = {token: text for token, text in strings.items() if not BYTE.fullmatch(text)}
    candidates = candidates or strings
    longest = max(candidates, key=lambda token: len(candidates[token]), default=NO_TOKEN)
    begin_it = all(candidates[longest].startswith(text) for text in candidates.values())
    return longest if begin_it else NO_TOKEN


def _few(words: torch.Tensor) -> tuple[int, ...]:
    """The tokens of a mask, ascending, if they are few; else none."""
    mask = words.numpy()
    (places,) = mask.nonzero()
    if len(places) > FEW:
        return ()
    bits = np.unpackbits(mask[places].view(np.uint8), bitorder="little").reshape(-1, 32)
    rows, columns = bits.nonzero()
    return tuple((places[rows] * 32 + columns).tolist()) if len(rows) <= FEW else ()
