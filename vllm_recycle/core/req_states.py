"""New requests and their numbers, and the names of vLLM that the package uses.

A runner numbers the states of its running requests. When a request ends its number may become
another's. Proposers know nothing else of a request.

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
from heapq import heappop, heappush
from typing import NamedTuple

from vllm_recycle.core.adjacency import GREEDY
from vllm_recycle.core.owners import Owner


class NewRequest(NamedTuple):
    """A request that starts, or goes on after a preemption.

    Attributes:
        req_state_idx: the number of its state.
        token_ids: its text, -1 where the input is no token.
        request_class: `GREEDY` or `SAMPLED`, by which acceptance is counted.
        owner: whose it is; None for nobody else's.
        hint: what its output may say, -1 between the parts; empty for none.
        teaches: whether its text enters the matrix.

    """

    req_state_idx: int
    token_ids: Sequence[int]
    request_class: int = GREEDY
    owner: Owner | None = None
    hint: Sequence[int] = ()
    teaches: bool = True


class ReqStateIndices(dict[str, int]):
    """Gives each running request the lowest free one, for runners that have none."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._free = list(range(capacity))  # a heap

    def assign(self, request_id: str) -> int:
        """The number of a request that has none yet."""
        assert request_id not in self
        self[request_id] = heappop(self._free)
        return self[request_id]

    def free(self, request_ids: Sequence[str]) -> list[int]:
        """Take back the numbers of those requests that have one, and return them."""
        indices = [self.pop(request_id) for request_id in request_ids if request_id in self]
        for index in indices:
            heappush(self._free, index)
        return indices
