"""Token Recycling as a proposer: what is drafted where, and what is learnt when.

A tree is grown for each request, or a template is filled; both from the one adjacency matrix, which
learns from every row that the target computes (arXiv 2408.08696, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vllm_recycle.core import reference
from vllm_recycle.core.acceptance import AcceptanceTable
from vllm_recycle.core.adjacency import (
    MAX_STEADINESS,
    NUM_COUNTED,
    OWN_BIT,
    AdjacencyMatrix,
    Ends,
    MatrixLayout,
)
from vllm_recycle.core.choose import Price
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.operations import Operations
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.saved_state import SavedState, check_token_ids
from vllm_recycle.core.tree import TreeTemplate

# Of the state file. The format before it did not count by classes of requests.
FORMAT = "vllm_recycle.adjacency_matrix/4"


class TokenRecyclingState(SavedState):
    """What is learnt: the adjacency matrix, and how often its entries were right."""

    def __init__(self, matrix: AdjacencyMatrix) -> None:
        self.matrix = matrix
        self.acceptance = AcceptanceTable(matrix.layout, device=matrix.table.device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"adjacency_matrix": self.matrix.table, "acceptance": self.acceptance.counts}

    @property
    def places(self) -> dict[str, torch.Tensor]:
        return {**self.tensors, "acceptance": self.acceptance.counts[:NUM_COUNTED]}

    @property
    def share_written(self) -> float:
        """The part of the entries that were ever written."""
        return self.matrix.num_written / len(self.matrix.table)

    def clear(self) -> None:
        """Forget everything but what is shipped."""
        self.matrix.clear()
        self.acceptance.clear()

    def contents(self) -> dict[str, torch.Tensor]:
        """What sequences share."""
        return {**self.places, "adjacency_matrix": self.matrix.shared_entries()}

    def validate(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_token_ids(tensors["adjacency_matrix"][:, 1:-1], self.matrix.layout.vocab_size)
        right, seen = tensors["acceptance"].unbind(-1)
        if not bool(((right >= 0) & (right <= seen) & seen.isfinite()).all()):
            raise ValueError("it has counts that are none")

    def is_better(self, peer_lines: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
        """Entries that are not known here, or were found steadier elsewhere; never for own ones."""
        head, peer_head = lines[:, :1], peer_lines[:, :1]
        is_steadier = (peer_head & MAX_STEADINESS > head & MAX_STEADINESS) & (head & OWN_BIT == 0)
        return (peer_head >= 0) & ((head < 0) | is_steadier)

    def describe(self) -> str:
        """What it holds, as part of a start-up line."""
        matrix, layout = self.matrix, self.matrix.layout
        return (
            f"k {layout.k}, contexts {list(layout.contexts)}, scope {matrix.scope}, "
            f"{matrix.num_written} of {len(matrix.table)} entries known"
        )

    @property
    def facts(self) -> dict[str, object]:
        layout = self.matrix.layout
        return {
            "format": FORMAT,
            "vocab_size": layout.vocab_size,
            "k": layout.k,
            "contexts": list(layout.contexts),
            "slots": layout.slots,
        }


class TokenRecyclingProposer:
    """Drafts a tree for each request, and learns from what the target computed.

    Args:
        state: what it learns.
        max_nodes: the most nodes of a tree that is grown.
        tree: the template to fill, its ranks below k; None to grow trees.
        seeds_from_prompts: whether the prompt's text enters the matrix before decoding.
        operations: what drafts, walks and learns.

    """

    def __init__(
        self,
        state: TokenRecyclingState,
        *,
        max_nodes: int,
        tree: TreeTemplate | None = None,
        seeds_from_prompts: bool = True,
        operations: Operations = reference,
    ) -> None:
        if tree is not None:
            tree.check_ranks(state.matrix.layout.k)
            max_nodes = tree.num_nodes
        self.state = state
        self.tree = tree
        self.num_nodes = max_nodes
        self.seeds_from_prompts = seeds_from_prompts
        self.operations = operations

    @property
    def layout(self) -> MatrixLayout:
        return self.state.matrix.layout

    def propose(
        self,
        texts: TextEnds,
        *,
        prices: Mapping[str, Price],
        max_nodes: int | None = None,
    ) -> Drafts:
        """See `draft`; of at most as many nodes as there is room for."""
        return self.operations.draft(
            self.state.matrix,
            self.state.acceptance.counts,
            texts,
            prices=prices,
            max_nodes=self.num_nodes if max_nodes is None else max_nodes,
            tree=self.tree,
        )

    def learn(self, ends: Ends, step: VerifiedStep) -> None:
        """Take in what the target computed; see `learn`."""
        state = self.state
        # Under `isolated` nobody's counts reach another: what is shipped serves.
        counts = state.acceptance.counts if self.layout.has_shared else None
        self.operations.learn(state.matrix, counts, ends, step)

    def add_request(self, request: NewRequest) -> None:
        """Begin with a request: its text, and then its hint, may enter the matrix as its own."""
        req_state_idx = request.req_state_idx
        self.state.matrix.begin(req_state_idx, request.request_class, request.owner)
        if self.seeds_from_prompts and request.teaches:
            self.take_in(request.token_ids, req_state_idx)
        if request.hint:
            self.take_in(request.hint, req_state_idx)

    def take_in(self, token_ids: Sequence[int], req_state_idx: int | None = None) -> None:
        """Take in a text as a prompt: of one request, or else for all of them."""
        matrix = self.state.matrix
        if req_state_idx is None:
            matrix, req_state_idx = matrix.of_all(), 0
        text = torch.tensor(token_ids, dtype=torch.int64)
        self.operations.seed(matrix, req_state_idx, text)
