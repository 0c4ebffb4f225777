"""Trees, the adjacency matrix, proposers and verification: torch only, no vllm, no triton."""

from vllm_recycle.core.adjacency import SCOPES, AdjacencyMatrix, Scope
from vllm_recycle.core.proposer import Proposer, SequenceNumbers
from vllm_recycle.core.token_recycling import TokenRecyclingProposer
from vllm_recycle.core.tree import TreeTemplate, load_tree, shipped_trees
from vllm_recycle.core.verification import WalkResult, step_down, walk

__all__ = [
    "SCOPES",
    "AdjacencyMatrix",
    "Proposer",
    "Scope",
    "SequenceNumbers",
    "TokenRecyclingProposer",
    "TreeTemplate",
    "WalkResult",
    "load_tree",
    "shipped_trees",
    "step_down",
    "walk",
]
