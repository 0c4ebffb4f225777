"""Trees, the adjacency matrix, proposers and verification: torch only, no vllm, no triton."""

from __future__ import annotations

from vllm_recycle.core.operations import REFERENCE, Operations
from vllm_recycle.core.proposer import Proposer, ReqStateIndices
from vllm_recycle.core.template_matrix import SCOPES, Scope, TemplateLayout, TemplateMatrix
from vllm_recycle.core.template_proposer import TemplateProposer
from vllm_recycle.core.tree import Trees, TreeTemplate, load_tree, shipped_trees
from vllm_recycle.core.verification import WalkResult, step_down, walk

__all__ = [
    "REFERENCE",
    "SCOPES",
    "Operations",
    "Proposer",
    "ReqStateIndices",
    "Scope",
    "TemplateLayout",
    "TemplateMatrix",
    "TemplateProposer",
    "TreeTemplate",
    "Trees",
    "WalkResult",
    "load_tree",
    "shipped_trees",
    "step_down",
    "walk",
]
