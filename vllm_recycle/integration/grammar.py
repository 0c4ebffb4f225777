"""What a grammar allows behind each row of a draft tree, as bit masks over the vocabulary.

vLLM's own masks are those of a chain. Here the grammar goes down each branch and comes back, which
xgrammar, guidance and outlines can, and lm-format-enforcer cannot.

A grammar is asked three times. While a draft grows, `GrammarAhead` says what may come next, where
the process that drafts has the grammar; then the scheduler takes out what is forbidden
(`GrammarMasks.allowed_rows`), and makes the masks of the rows that are left (`GrammarMasks.fill`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vllm_recycle.core.grow import Allowed
from vllm_recycle.core.tree import children_of
from vllm_recycle.core.verification import NO_TOKEN

ALL_ALLOWED = -1
# Rows of a draft that a grammar is asked at, and how many allowed tokens are few: behind these one
# is expected.
MOST_ROWS, FEW = 16, 16
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of some vocabularies


class GrammarMasks:
    """The masks of a step, in memory that is as large as steps have asked for.

    vLLM's, in its `StructuredOutputManager`, has a row for every node that all requests could have
    together: 1.3 GB for 1,024 requests, 80 nodes and a vocabulary of 128k.

    Args:
        manager: vLLM's `StructuredOutputManager`.

    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.masks: torch.Tensor | None = None

    def is_constrained(self, request: Any) -> bool:
        """Whether the next token of a request follows its grammar; it may reason first."""
        return self.manager._get_constraint_bounds(request, ()).constraint_start == 0

    def ahead(self, request: Any) -> GrammarAhead:
        """What looks ahead of the text of a request, as long as the request lives."""
        structured = request.structured_output_request
        if not hasattr(structured, "ahead"):
            structured.ahead = GrammarAhead(structured.grammar, self.manager)
        return structured.ahead

    def allowed_rows(self, request: Any) -> list[int]:
        """The rows of those nodes of the draft of a request that its grammar allows, ascending.

        Where an end ends the grammar alone it has no row: vLLM's guidance takes no token behind it
        in the step that brings it.
        """
        draft, grammar = request.spec_token_ids, request.structured_output_request.grammar
        if grammar.is_terminated():
            return list(range(1, 1 + len(draft)))
        rows, ends = self._make_room(1 + len(draft)), not request.sampling_params.ignore_eos
        return fill_tree(rows, grammar, draft, request.draft_parents, ends=ends)

    def fill(self, requests: Sequence[Any], drafts: Mapping[str, Sequence[int]]) -> np.ndarray:
        """The masks of the root and of each scheduled node of these requests.

        Args:
            requests: that follow a grammar; `draft_parents` of each that has a draft has the
                parents of its nodes.
            drafts: scheduled draft tokens by the name of the request, -1 where not filled.

        Returns:
            int32 [rows of all, words]; token t is allowed where bit t % 32 of word t // 32 is set.
            Rows that cannot be reached allow all.
        """
        of_names = [drafts.get(request.request_id, ()) for request in requests]
        starts = np.cumsum([0, *(1 + len(draft) for draft in of_names)])
        masks = self._make_room(int(starts[-1]))
        for request, draft, start in zip(requests, of_names, starts[:-1], strict=True):
            rows = masks[start : start + 1 + len(draft)]
            if self.is_constrained(request):
                parents = request.draft_parents[: len(draft)] if draft else ()
                fill_tree(rows, request.structured_output_request.grammar, draft, parents)
            else:
                self._forbid_ends(rows, request)
        return masks.numpy()

    def _forbid_ends(self, rows: torch.Tensor, request: Any) -> None:
        """Forbid what would end the reasoning of a request and be content that its grammar refuses.

        vLLM 0.32 has no such tokens.
        """
        ends = getattr(self.manager, "_masked_reasoning_ends", lambda _: ())
        words = rows.numpy().view(np.uint32)
        for token in ends(request):
            words[:, token // 32] &= ~np.uint32(1 << token % 32)

    def _make_room(self, num_rows: int) -> torch.Tensor:
        if self.masks is None or len(self.masks) < num_rows:
            self.masks = self.manager.backend.allocate_token_bitmask(num_rows)
        return self.masks[:num_rows].fill_(ALL_ALLOWED)


class GrammarAhead:
    """The grammar of a request, which goes ahead of its text and comes back; see `grow.Grammar`.

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
        self.longest = manager.vllm_config.num_speculative_tokens  # that outlines comes back from
        self.new: list[int] = []  # tokens of the text that the scheduler has not given it yet
        self.taken: list[int] = []  # tokens that the grammar has taken ahead of the scheduler
        self.seen: dict[tuple[int, ...], Allowed] = {}  # at the rows of the last draft
        self.habits: dict[tuple[int, ...], int] = {}  # what came where these were allowed

    @contextmanager
    def behind(self, token_ids: Sequence[int]) -> Iterator[None]:
        """Look ahead of the text with these tokens, which the grammar takes in later."""
        for place, token in enumerate(token_ids):
            if (seen := self.seen.get(tuple(token_ids[:place]))) and (few := _few(seen.words)):
                self.habits[few] = token
        self.new = [*token_ids]
        self.seen.clear()
        try:
            yield
        finally:
            self._go([])

    def allowed(self, path: Sequence[int]) -> Allowed | None:
        """See `grow.Grammar`; of too many rows nothing is said, and nothing behind an end."""
        key = tuple(path)
        if key not in self.seen:
            if len(self.seen) == MOST_ROWS or not self._go([*self.new, *path]):
                return None
            words = self.masks[len(self.seen)].fill_(ALL_ALLOWED)
            self.grammar.fill_bitmask(self.masks, len(self.seen))
            self.seen[key] = Allowed(words, self._expected(_few(words)))
        return self.seen[key]

    def _expected(self, few: tuple[int, ...]) -> int:
        if not few or few in self.habits:
            return self.habits.get(few, NO_TOKEN)
        known = [token for token in few if token < len(self.tokenizer)]  # a mask has whole words
        texts = self.tokenizer.convert_ids_to_tokens(known)
        return longest_of(dict(zip(known, texts, strict=True)))

    def _go(self, path: list[int]) -> bool:
        """Bring the grammar behind these tokens; whether it is there, and something may follow."""
        while self.taken != path[: len(self.taken)]:
            self.grammar.rollback(1)  # what accepts one token takes back one
            self.taken.pop()
        if len(path) > self.longest:
            return False
        for token in path[len(self.taken) :]:
            if self.grammar.is_terminated() or not self.grammar.accept_tokens("", [token]):
                return False
            self.taken.append(token)
        return not self.grammar.is_terminated()


def longest_of(texts: Mapping[int, str]) -> int:
    """The token with the longest text, if it begins with those of all others; else -1."""
    whole = {token: text for token, text in texts.items() if not BYTE.fullmatch(text)} or texts
    longest = max(whole, key=lambda token: len(whole[token]), default=NO_TOKEN)
    begin_it = all(whole[longest].startswith(text) for text in whole.values())
    return longest if begin_it else NO_TOKEN


def _few(words: torch.Tensor) -> tuple[int, ...]:
    """The tokens of a mask, ascending, if they are few; else none."""
    of_words = words.numpy()
    (places,) = of_words.nonzero()
    if len(places) > FEW:
        return ()
    bits = np.unpackbits(of_words[places].view(np.uint8), bitorder="little").reshape(-1, 32)
    rows, columns = bits.nonzero()
    return tuple((places[rows] * 32 + columns).tolist()) if len(rows) <= FEW else ()


def fill_tree(
    masks: torch.Tensor,
    grammar: Any,
    token_ids: Sequence[int],
    parents: Sequence[int],
    *,
    ends: bool = True,
) -> list[int]:
    """Fill the masks of a tree, depth first; the grammar is then where it was.

    Nothing is asked below what the grammar forbids, nor below its end, behind which all is allowed.

    Args:
        masks: int32 [rows, words], the root first, in which all is allowed; written in place.
        grammar: vLLM's `StructuredOutputGrammar`, behind the token at the root.
        token_ids: of each node, -1 where it was not filled.
        parents: of each node, its parent row.
        ends: whether nodes that end the grammar are among what is returned.

    Returns:
        The rows of the nodes that are allowed, ascending; what is below an end is not among them.
    """
    children, words = children_of(parents), masks.numpy()
    reached: list[int] = []

    def visit(row: int) -> None:
        if grammar.is_terminated():
            return
        grammar.fill_bitmask(masks, row)
        for child in children[row]:
            token = token_ids[child - 1]
            allowed = token >= 0 and int(words[row, token // 32]) >> token % 32 & 1
            # What accepts one token takes back one.
            if allowed and grammar.accept_tokens("", [token]):
                if ends or not grammar.is_terminated():
                    reached.append(child)
                visit(child)
                grammar.rollback(1)

    visit(0)
    return sorted(reached)
