"""The functions of a step that have faster twins, by their signatures.

`core.reference`, in plain torch, defines what is correct. It and `kernels.cpu.calls` satisfy
`Operations`. Triton's kernels write into buffers and have signatures of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from vllm_recycle.core.adjacency import AdjacencyMatrix, Ends
from vllm_recycle.core.choose import Price
from vllm_recycle.core.copies import Copies
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grow import TextEnds, Trunks
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.tree import Trees, TreeTemplate
from vllm_recycle.core.verification import WalkResult


class Operations(Protocol):
    """All functions; see `verification`, `draft`, `copies` and `learn`."""

    def walk(
        self,
        sampled: torch.Tensor,
        draft_token_ids: torch.Tensor,
        cu_num_logits: torch.Tensor,
        *,
        trees: Trees,
    ) -> WalkResult: ...

    def draft(
        self,
        matrix: AdjacencyMatrix,
        counts: torch.Tensor,
        texts: TextEnds,
        *,
        prices: Mapping[str, Price],
        max_nodes: int,
        tree: TreeTemplate | None = None,
    ) -> Drafts: ...

    def learn(
        self,
        matrix: AdjacencyMatrix,
        counts: torch.Tensor | None,
        ends: Ends,
        step: VerifiedStep,
    ) -> None: ...

    def seed(
        self, matrix: AdjacencyMatrix, req_state_idx: int, token_ids: torch.Tensor
    ) -> None: ...

    def draft_copies(self, copies: Copies, idx_mapping: torch.Tensor, ends: Ends) -> Trunks: ...

    def learn_copies(
        self, copies: Copies, idx_mapping: torch.Tensor, ends: Ends, token_ids: torch.Tensor
    ) -> None: ...

    def top_k(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]: ...
