"""The drafters on Model Runner V2, by the name of their method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_recycle.integration.cuda.drafter import V2Drafter
from vllm_recycle.integration.cuda.ouroboros.drafter import OuroborosV2Drafter
from vllm_recycle.integration.cuda.token_recycling import TokenRecyclingV2Drafter
from vllm_recycle.integration.options import OUROBOROS, TOKEN_RECYCLING

DRAFTERS: dict[str, Callable[[Any, torch.device, Any], V2Drafter]] = {
    TOKEN_RECYCLING: TokenRecyclingV2Drafter,
    OUROBOROS: OuroborosV2Drafter,
}
