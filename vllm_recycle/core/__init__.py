"""Trees, the adjacency matrix, proposers and verification: torch only, no vllm, no triton."""

from __future__ import annotations

from vllm_recycle.core.adjacency import SCOPES, AdjacencyMatrix, Scope, TableLayout
from vllm_recycle.core.operations import REFERENCE, Operations
from vllm_recycle.core.proposer import AnyProposer, Proposer, ReqStateIndices
from vllm_recycle.core.token_recycling import TokenRecyclingProposer
from vllm_recycle.core.tree import BatchTrees, TreeTemplate, load_tree, shipped_trees
from vllm_recycle.core.verification import WalkResult, step_down, walk

__all__ = [
    "REFERENCE",
    "SCOPES",
    "AdjacencyMatrix",
    "AnyProposer",
    "BatchTrees",
    "Operations",
    "Proposer",
    "ReqStateIndices",
    "Scope",
    "TableLayout",
    "TokenRecyclingProposer",
    "TreeTemplate",
    "WalkResult",
    "load_tree",
    "shipped_trees",
    "step_down",
    "walk",
]
