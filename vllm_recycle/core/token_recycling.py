"""Grown trees as a proposer: what is drafted where, and what is learnt when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vllm_recycle.core.acceptance import AcceptanceTable
from vllm_recycle.core.adjacency import AdjacencyMatrix, MatrixLayout
from vllm_recycle.core.dynamic_operations import REFERENCE_DYNAMIC, DynamicOperations
from vllm_recycle.core.operations import REFERENCE, Operations
from vllm_recycle.core.saved_state import SavedState, check_token_ids
from vllm_recycle.core.tree import Trees
from vllm_recycle.core.verification import WalkResult


class TokenRecyclingState(SavedState):
    """What is learnt: the rows, and how often they were right."""

    def __init__(self, rows: AdjacencyMatrix) -> None:
        self.rows = rows
        self.acceptance = AcceptanceTable(rows.layout, device=rows.table.device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"context_rows": self.rows.table, "acceptance": self.acceptance.counts}

    @property
    def share_written(self) -> float:
        """The part of the rows that were ever written."""
        return self.rows.num_written / len(self.rows.table)

    def clear(self) -> None:
        """Forget everything but what is shipped."""
        self.rows.clear()
        self.acceptance.clear()

    def contents(self) -> dict[str, torch.Tensor]:
        """What sequences share."""
        return {**self.tensors, "context_rows": self.rows.shared_entries()}

    def validate(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_token_ids(tensors["context_rows"][:, 1:-1], self.rows.layout.vocab_size)
        right, seen = tensors["acceptance"].unbind(-1)
        if not bool(((right >= 0) & (right <= seen) & seen.isfinite()).all()):
            raise ValueError("it has counts that are none")

    @property
    def facts(self) -> dict[str, object]:
        layout = self.rows.layout
        return {
            "vocab_size": layout.vocab_size,
            "k": layout.k,
            "contexts": list(layout.contexts),
            "slots": layout.slots,
        }


class TokenRecyclingProposer:
    """Grows a tree for each request, and learns from what the target computed.

    Its trees are kept by `req_state_idx` until they are verified; a prefix of a tree may be.

    Args:
        state: what it learns.
        max_nodes: the most nodes of a tree.
        max_num_reqs: every `req_state_idx` is below this.
        seed_from_prompt: whether the prompt's text enters the rows before decoding.
        operations: what walks.
        dynamic_operations: what grows and learns.

    """

    def __init__(
        self,
        state: TokenRecyclingState,
        *,
        max_nodes: int,
        max_num_reqs: int,
        seed_from_prompt: bool = True,
        operations: Operations = REFERENCE,
        dynamic_operations: DynamicOperations = REFERENCE_DYNAMIC,
    ) -> None:
        self.state = state
        self.num_nodes = max_nodes
        self.seed_from_prompt = seed_from_prompt
        self.operations = operations
        self.dynamic_operations = dynamic_operations
        roots = torch.zeros(max_num_reqs, max_nodes + 1, dtype=torch.int64)
        self._trees = Trees.from_parents(roots)

    @property
    def layout(self) -> MatrixLayout:
        return self.state.rows.layout

    def trees_of(self, idx_mapping: torch.Tensor) -> Trees:
        """The trees that were grown last for these requests, int64 [batch]."""
        return self._trees.select(idx_mapping)

    def propose(
        self,
        idx_mapping: torch.Tensor,
        tails: torch.Tensor,
        *,
        max_depths: torch.Tensor,
        times: torch.Tensor,
        slopes: torch.Tensor,
        num_other_rows: int,
        max_nodes: int | None = None,
    ) -> torch.Tensor:
        """Draft below the last token of each request.

        Args:
            idx_mapping: int64 [batch].
            tails: int64 [batch, reach], the end of each text, the newest token first, padded
                with -1.
            max_depths: int64 [batch], the most tokens that a path of each may have.
            times: float64 [rows + 1], the time of a step by its rows.
            slopes: float64 [rows + 1], what a row more costs at least.
            num_other_rows: requests of the step that is drafted for beside these.
            max_nodes: the most nodes of a tree; None for as many as there is room for.

        Returns:
            int64 [batch, max_nodes], padded with -1.

        """
        state, max_nodes = self.state, self.num_nodes if max_nodes is None else max_nodes
        growth = self.dynamic_operations.grow(
            state.rows.table,
            state.acceptance.rates(),
            layout=self.layout,
            salts=state.rows.salts[idx_mapping],
            tails=tails,
            max_depths=max_depths,
            times=times,
            slopes=slopes,
            num_other_rows=num_other_rows,
            max_nodes=max_nodes,
        )
        # What is behind the last row of a smaller tree is nobody's.
        rows, trees = max_nodes + 1, growth.trees
        self._trees.parents[idx_mapping, :rows] = trees.parents
        self._trees.depths[idx_mapping, :rows] = trees.depths
        self._trees.ancestor_mask[idx_mapping, :rows, :rows] = trees.ancestor_mask
        return growth.token_ids

    def learn(
        self,
        idx_mapping: torch.Tensor,
        tails: torch.Tensor,
        trees: Trees,
        row_token_ids: torch.Tensor,
        cu_num_logits: torch.Tensor,
        successors: torch.Tensor,
        walked: WalkResult,
    ) -> None:
        """Take in what the target computed, and what was accepted of it.

        Args:
            idx_mapping: int64 [batch].
            tails: int64 [batch, reach], text before and with each root.
            trees: that were verified.
            row_token_ids: int64 [logit rows].
            cu_num_logits: int64 [batch + 1]; the rows of a request are the root, and then the
                nodes that were scheduled.
            successors: int32 [logit rows, k], the target's most probable tokens, best first.
            walked: what the walk accepted.

        """
        state = self.state
        # Under `isolated` nobody's counts reach another: what is shipped serves.
        counts = state.acceptance.counts if self.layout.writes_shared else None
        self.dynamic_operations.learn(
            state.rows.table,
            counts,
            layout=self.layout,
            salts=state.rows.salts[idx_mapping],
            tails=tails,
            parents=trees.parents,
            row_token_ids=row_token_ids,
            cu_num_logits=cu_num_logits,
            successors=successors,
            walked=walked,
        )

    def begin(self, req_state_idx: int, token_ids: torch.Tensor) -> None:
        """A request starts with a text, int64 [length]."""
        rows = self.state.rows
        rows.begin(req_state_idx)
        if self.seed_from_prompt:
            salt = int(rows.salts[req_state_idx])
            self.dynamic_operations.seed(rows.table, token_ids, salt, layout=self.layout)

    def release(self, req_state_indices: Sequence[int]) -> None:
        """These requests ended; what they wrote for themselves is found by nobody any more."""
