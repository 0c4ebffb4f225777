"""The drafters of the V1 runner, by the name of their method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_recycle.integration.cpu.drafter import V1Drafter
from vllm_recycle.integration.cpu.ouroboros import OuroborosV1Drafter
from vllm_recycle.integration.cpu.token_recycling import TokenRecyclingV1Drafter
from vllm_recycle.integration.options import OUROBOROS, TOKEN_RECYCLING

DRAFTERS: dict[str, Callable[[Any, torch.device, Any], V1Drafter]] = {
    TOKEN_RECYCLING: TokenRecyclingV1Drafter,
    OUROBOROS: OuroborosV1Drafter,
}
