"""What a runner asks of a drafting method, whatever the method and whatever the runner.

Sequences are numbered by the runner: a number belongs to one running request at a time, and the
runner says when that ends. A proposer knows neither requests nor runners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_recycle.core.operations import Operations
from vllm_recycle.core.tree import TreeTemplate


class Proposer(Protocol):
    """Drafts trees, learns from every verified row, and forgets sequences that ended."""

    tree: TreeTemplate
    operations: Operations

    def propose(self, sequences: torch.Tensor, last_token_ids: torch.Tensor) -> torch.Tensor:
        """Draft below the last token of each sequence.

        Args:
            sequences: int64 [batch].
            last_token_ids: int64 [batch].

        Returns:
            int64 [batch, nodes], indexed by the nodes of `tree`, -1 where there is no draft.

        """

    def observe(
        self,
        sequences: torch.Tensor,
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        row_starts: torch.Tensor,
    ) -> None:
        """Take in what the target computed, accepted or not.

        Args:
            sequences: int64 [logit rows], the sequence of each row.
            token_ids: int64 [logit rows], the token that each row was computed for, -1 to ignore a
                row.
            logits: [logit rows, vocab], raw: before penalties, temperature and grammar.
            row_starts: integer [batch + 1], where the rows of each sequence begin, and the end; of
                each the root, and then the nodes of `tree` that were scheduled.

        """

    def begin(self, sequences: torch.Tensor, prompt_token_ids: torch.Tensor) -> None:
        """Some sequences start.

        Args:
            sequences: int64 [n], whose each token is; the tokens of a prompt lie together.
            prompt_token_ids: int64 [n].

        """

    def release(self, sequences: Sequence[int]) -> None:
        """These sequences ended: finished, aborted or preempted. Their numbers may come again."""


class SequenceNumbers:
    """Gives each running request the lowest free sequence number, for runners that have none."""

    def __init__(self, capacity: int) -> None:
        self._free = list(range(capacity - 1, -1, -1))
        self._of: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, request_id: str) -> int:
        return self._of[request_id]

    def assign(self, request_id: str) -> int:
        """The number of a request that has none yet."""
        assert request_id not in self._of
        self._of[request_id] = self._free.pop()
        return self._of[request_id]

    def free(self, request_ids: Sequence[str]) -> list[int]:
        """Take back the numbers of those requests that have one, and return them."""
        numbers = [self._of.pop(request_id) for request_id in request_ids if request_id in self._of]
        self._free = sorted((*self._free, *numbers), reverse=True)
        return numbers
