"""The drafter of each method on Model Runner V2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_recycle.integration.cuda.drafter import V2Drafter
from vllm_recycle.integration.cuda.ouroboros.drafter import OuroborosV2Drafter
from vllm_recycle.integration.cuda.token_recycling import TokenRecyclingV2Drafter
from vllm_recycle.integration.options import OUROBOROS, TOKEN_RECYCLING, options_of

DRAFTERS: dict[str, Callable[[Any, torch.device, Any], V2Drafter]] = {
    TOKEN_RECYCLING: TokenRecyclingV2Drafter,
    OUROBOROS: OuroborosV2Drafter,
}


def make_drafter(vllm_config: Any, device: torch.device, req_states: Any) -> V2Drafter:
    """That of an engine.

    Args:
        vllm_config: of the engine.
        device: where all that it learns lives.
        req_states: the runner's, whose texts are read.

    """
    return DRAFTERS[options_of(vllm_config).method](vllm_config, device, req_states)
