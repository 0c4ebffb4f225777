"""Trees that are grown to their worth: context rows, measured acceptance, priced nodes.

What Token Recycling has for one token this has for the last few, what is drafted from a row is
worth what was measured of such rows, and a node is drafted where it is worth its row.
"""

from __future__ import annotations

from vllm_recycle.core.dynamic.acceptance import AcceptanceTable
from vllm_recycle.core.dynamic.context_rows import ContextRows, RowLayout
from vllm_recycle.core.dynamic.growth import Growth, grow
from vllm_recycle.core.dynamic.learning import learn, seed
from vllm_recycle.core.dynamic.node_acceptance import NodeAcceptance, best_prefix
from vllm_recycle.core.dynamic.operations import REFERENCE_DYNAMIC, DynamicOperations
from vllm_recycle.core.dynamic.prices import Load, StepTimes
from vllm_recycle.core.dynamic.proposer import DynamicState, DynamicTreeProposer

__all__ = [
    "REFERENCE_DYNAMIC",
    "AcceptanceTable",
    "ContextRows",
    "DynamicOperations",
    "DynamicState",
    "DynamicTreeProposer",
    "Growth",
    "Load",
    "NodeAcceptance",
    "RowLayout",
    "StepTimes",
    "best_prefix",
    "grow",
    "learn",
    "seed",
]
