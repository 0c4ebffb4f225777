"""The functions of a step that have faster twins, by their signatures.

`core.reference`, in plain torch, defines what is correct. It and `kernels.cpu.calls` satisfy
`Operations`; `kernels.triton.operations` satisfies `PhraseOperations`. Triton's kernels of Token
Recycling write into buffers and have signatures of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from vllm_recycle.core.adjacency import AdjacencyMatrix, Ends
from vllm_recycle.core.choose import Price
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.draft_shape import DraftShape
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.harvest import Phrases
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.tree import Trees, TreeTemplate
from vllm_recycle.core.verification import WalkResult


class PhraseOperations(Protocol):
    """What Ouroboros calls; see `verification`, `phrase_pool` and `harvest`."""

    def walk(
        self,
        sampled: torch.Tensor,
        draft_token_ids: torch.Tensor,
        cu_num_logits: torch.Tensor,
        *,
        trees: Trees,
    ) -> WalkResult: ...

    def insert_phrases(
        self,
        table: torch.Tensor,
        token_ids: torch.Tensor,
        phrases: torch.Tensor,
        *,
        replaced: torch.Tensor | None = None,
    ) -> None: ...

    def newest_phrases(
        self, table: torch.Tensor, token_ids: torch.Tensor, count: int
    ) -> torch.Tensor: ...

    def harvest(
        self,
        row_token_ids: torch.Tensor,
        sampled: torch.Tensor,
        cu_num_logits: torch.Tensor,
        *,
        shape: DraftShape,
    ) -> tuple[Phrases, Phrases]: ...


class Operations(PhraseOperations, Protocol):
    """All functions; those of the matrix are in `draft` and `learn`."""

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

    def top_k(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]: ...
