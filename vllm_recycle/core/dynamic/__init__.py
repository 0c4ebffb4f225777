"""Trees that are grown to their worth: context rows, measured acceptance, priced nodes.

What Token Recycling has for one token this has for the last few, what is drafted from a row is
worth what was measured of such rows, and a node is drafted where it is worth its row.
"""

from __future__ import annotations

from vllm_recycle.core.dynamic.acceptance import AcceptanceTable
from vllm_recycle.core.dynamic.context_rows import ContextRows, RowLayout
from vllm_recycle.core.dynamic.growth import Growth, grow
from vllm_recycle.core.dynamic.learning import learn, seed
from vllm_recycle.core.dynamic.operations import REFERENCE_DYNAMIC, DynamicOperations
from vllm_recycle.core.dynamic.prices import StepTimes
from vllm_recycle.core.dynamic.proposer import DynamicState, DynamicTreeProposer

__all__ = [
    "REFERENCE_DYNAMIC",
    "AcceptanceTable",
    "ContextRows",
    "DynamicOperations",
    "DynamicState",
    "DynamicTreeProposer",
    "Growth",
    "RowLayout",
    "StepTimes",
    "grow",
    "learn",
    "seed",
]
