"""What a grammar allows behind each row of a draft tree, as bit masks over the vocabulary.

vLLM's own masks are those of a chain. Here the grammar goes down each branch and comes back, which
xgrammar, guidance and outlines can, and lm-format-enforcer cannot.

A grammar is asked three times. While a draft grows, the worker asks one of its own what may come
next (`cpu.grammar_ahead`). Then the scheduler takes out what is forbidden
(`GrammarMasks.allowed_rows`), and makes the masks of the rows that are left (`GrammarMasks.fill`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm_recycle.core.tree import children_of
from vllm_recycle.integration.start.versions import FEATURES

ALL_ALLOWED = -1


class GrammarMasks:
    """The masks of a step, in memory that is as large as steps have asked for.

    vLLM's, in its `StructuredOutputManager`, has a row for every node that all requests could have
    together: 1.3 GB for 1,024 requests, 80 nodes and a vocabulary of 128k.

    Args:
        manager: vLLM's `StructuredOutputManager`.

    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self._accept_tokens, manager.accept_tokens = manager.accept_tokens, self.accept_tokens
        self.masks: torch.Tensor | None = None

    def is_constrained(self, request: Any) -> bool:
        """Whether the next token of a request follows its grammar; it may reason first."""
        return self._bounds(request, ())[1] == 0

    def comes_back(self, request: Any) -> bool:
        """Whether the grammar of a request may go down a branch, and back.

        Outlines of vLLM 0.30 is at its end whenever it is asked twice. Remove when that is dropped.
        """
        return not hasattr(request.structured_output_request.grammar, "_prev_finished")

    def _bounds(self, request: Any, token_ids: Sequence[int]) -> tuple[int, int]:
        """From which of these new tokens on a request's grammar takes them in, and binds them."""
        if FEATURES.bounds_constraints:
            return self.manager._get_constraint_bounds(request, token_ids)
        return (self.manager._get_constraint_start(request, token_ids),) * 2

    def start(self, request: Any) -> int | None:
        """How many tokens a request reasoned in, before its grammar began; None till then."""
        if not self.is_constrained(request):
            return None
        return getattr(request.structured_output_request, "num_reasoned", 0)

    def see_reasoning_end(self, request: Any, token_ids: Sequence[int]) -> None:
        """Note where a request ends to reason, if it does in these new tokens of its output."""
        start, _ = self._bounds(request, token_ids)
        if start <= len(token_ids):
            request.structured_output_request.num_reasoned = request.num_output_tokens + start

    def allowed_rows(self, request: Any) -> list[int]:
        """The rows of those nodes of the draft of a request that its grammar allows, ascending."""
        draft, grammar = request.spec_token_ids, request.structured_output_request.grammar
        if grammar.is_terminated():
            return list(range(1, 1 + len(draft)))
        rows = self._make_room(1 + len(draft))
        return fill_tree(rows, grammar, draft, request.draft_parents)

    def accept_tokens(self, request: Any, token_ids: Sequence[int]) -> bool:
        """As vLLM's manager, but token by token where the text goes on behind an end.

        vLLM's guidance refuses tokens behind an end that come with it.
        """
        if not (request.use_structured_output and request.sampling_params.ignore_eos):
            return self._accept_tokens(request, token_ids)
        return all(self._accept_tokens(request, [token]) for token in token_ids)

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
        request_drafts = [drafts.get(request.request_id, ()) for request in requests]
        starts = np.cumsum([0, *(1 + len(draft) for draft in request_drafts)])
        masks = self._make_room(int(starts[-1]))
        for request, draft, start in zip(requests, request_drafts, starts[:-1], strict=True):
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


def rows_of_masks(output: Any, req_ids: Sequence[str], starts: Sequence[int]) -> list[int]:
    """The logit rows that masks are of, in the order of the masks.

    vLLM's functions that apply masks are told that each row is a request of its own, for which all
    of its versions want one mask. What they want for a request with a draft differs.

    Args:
        output: vLLM's `GrammarOutput`, with masks that `GrammarMasks.fill` made.
        req_ids: of the batch.
        starts: where the logit rows of each request begin, and the end.

    """
    index_of = {name: index for index, name in enumerate(req_ids)}
    indices = [index_of[name] for name in output.structured_output_request_ids]
    return [row for index in indices for row in range(starts[index], starts[index + 1])]


def fill_tree(
    masks: torch.Tensor,
    grammar: Any,
    token_ids: Sequence[int],
    parents: Sequence[int],
) -> list[int]:
    """Fill the masks of a tree, depth first; the grammar is then where it was.

    Nothing is asked below what the grammar forbids, nor below its end, behind which all is allowed.

    Args:
        masks: int32 [rows, words], the root first, in which all is allowed; written in place.
        grammar: vLLM's `StructuredOutputGrammar`, behind the token at the root.
        token_ids: of each node, -1 where it was not filled.
        parents: of each node, its parent row.

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
                reached.append(child)
                visit(child)
                grammar.rollback(1)

    visit(0)
    return sorted(reached)
