"""What a runner asks of a drafting method, whatever the method and whatever the runner.

A runner numbers the states of its running requests, and says when a request ends; the number may
then be another's. A proposer knows nothing else of a request.

What is vLLM's has the names of its Model Runner V2 (`vllm.v1.worker.gpu`), throughout the package:

    req_state_idx          the number of a request's state
    idx_mapping            [batch], the req_state_idx of each request of a batch
    expanded_idx_mapping   [n], the req_state_idx of each row, or of each token
    cu_num_logits          [batch + 1], where the logit rows of each request begin, and the end
    logits_indices         [logit rows], where each logit row is among the rows of the forward
    expanded_local_pos     [logit rows], where each is among those of its request

and so have `query_start_loc`, `seq_lens`, `block_table`, `slot_mapping`, `num_computed_tokens` and
`max_num_reqs`. Rows, nodes, trees and paths are ours (`core.tree`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_recycle.core.operations import PhraseOperations
from vllm_recycle.core.tree import TreeTemplate


class AnyProposer(Protocol):
    """What all have, however their trees are made."""

    @property
    def operations(self) -> PhraseOperations:
        """What walks, among others."""

    def release(self, req_state_indices: Sequence[int]) -> None:
        """These requests ended: finished, aborted or preempted. Their numbers may come again."""


class Proposer(AnyProposer, Protocol):
    """Drafts one tree for all, learns from every verified row, forgets requests that ended."""

    tree: TreeTemplate

    def propose(self, idx_mapping: torch.Tensor, last_token_ids: torch.Tensor) -> torch.Tensor:
        """Draft below the last token of each request.

        Args:
            idx_mapping: int64 [batch].
            last_token_ids: int64 [batch].

        Returns:
            int64 [batch, nodes], indexed by the nodes of `tree`, -1 where there is no draft.

        """

    def observe(
        self,
        expanded_idx_mapping: torch.Tensor,
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
    ) -> None:
        """Take in what the target computed, accepted or not.

        Args:
            expanded_idx_mapping: int64 [logit rows].
            token_ids: int64 [logit rows], the token that each row was computed for, -1 to ignore a
                row.
            logits: [logit rows, vocab], raw: before penalties, temperature and grammar.
            cu_num_logits: integer [batch + 1]; the rows of a request are the root, and then the
                nodes of `tree` that were scheduled.

        """

    def begin(self, expanded_idx_mapping: torch.Tensor, prompt_token_ids: torch.Tensor) -> None:
        """Some requests start.

        Args:
            expanded_idx_mapping: int64 [n], of each token; the tokens of a prompt lie together.
            prompt_token_ids: int64 [n].

        """


class ReqStateIndices:
    """Gives each running request the lowest free one, for runners that have none."""

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
        freed = [self._of.pop(request_id) for request_id in request_ids if request_id in self._of]
        self._free = sorted((*self._free, *freed), reverse=True)
        return freed
