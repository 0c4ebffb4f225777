"""The drafters of the V1 runner, by the options of their methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_recycle.integration.cpu.drafter import V1Drafter
from vllm_recycle.integration.cpu.hosted_trunk import HostedTrunkV1Drafter
from vllm_recycle.integration.cpu.ouroboros import OuroborosV1Drafter
from vllm_recycle.integration.cpu.token_recycling import TokenRecyclingV1Drafter
from vllm_recycle.integration.cpu.trunk import TrunkV1Drafter
from vllm_recycle.integration.options import (
    HostedTrunkOptions,
    MethodOptions,
    OuroborosOptions,
    TokenRecyclingOptions,
    TrunkOptions,
)

DRAFTERS: dict[type[MethodOptions], Callable[[Any, torch.device, Any], V1Drafter]] = {
    TokenRecyclingOptions: TokenRecyclingV1Drafter,
    OuroborosOptions: OuroborosV1Drafter,
    TrunkOptions: TrunkV1Drafter,
    HostedTrunkOptions: HostedTrunkV1Drafter,
}
