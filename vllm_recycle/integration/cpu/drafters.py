"""The drafters of the V1 runner, by what drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_recycle.integration.cpu.drafter import V1Drafter
from vllm_recycle.integration.cpu.hosted_trunk import HostedTrunkV1Drafter
from vllm_recycle.integration.cpu.ouroboros import OuroborosV1Drafter
from vllm_recycle.integration.cpu.token_recycling import TokenRecyclingV1Drafter
from vllm_recycle.integration.cpu.trunk import TrunkV1Drafter
from vllm_recycle.integration.options.base import HOSTED_TRUNK, MATRIX, OWN_TRUNK, PHRASES

DRAFTERS: dict[str, Callable[[Any, torch.device, Any], V1Drafter]] = {
    MATRIX: TokenRecyclingV1Drafter,
    HOSTED_TRUNK: HostedTrunkV1Drafter,
    OWN_TRUNK: TrunkV1Drafter,
    PHRASES: OuroborosV1Drafter,
}
