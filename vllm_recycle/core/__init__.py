"""Trees, the adjacency matrix, proposers and verification: torch only, no vllm, no triton."""

from __future__ import annotations

from vllm_recycle.core.adjacency import SCOPES, AdjacencyMatrix, MatrixLayout, Scope
from vllm_recycle.core.operations import Operations, PhraseOperations
from vllm_recycle.core.req_states import ReqStateIndices
from vllm_recycle.core.tree import Trees, TreeTemplate, load_tree, shipped_trees
from vllm_recycle.core.verification import WalkResult, step_down, walk

__all__ = [
    "SCOPES",
    "AdjacencyMatrix",
    "MatrixLayout",
    "Operations",
    "PhraseOperations",
    "ReqStateIndices",
    "Scope",
    "TreeTemplate",
    "Trees",
    "WalkResult",
    "load_tree",
    "shipped_trees",
    "step_down",
    "walk",
]
