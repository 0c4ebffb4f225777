"""The drafters of the V1 runner, by the name of their method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_recycle.integration.cpu.drafter import V1Drafter
from vllm_recycle.integration.cpu.ouroboros import OuroborosV1Drafter
from vllm_recycle.integration.cpu.token_recycling import TemplateV1Drafter, TokenRecyclingV1Drafter
from vllm_recycle.integration.options import OUROBOROS, TOKEN_RECYCLING, options_of


def _token_recycling(vllm_config: Any, device: torch.device, runner: Any) -> V1Drafter:
    is_dynamic = options_of(vllm_config).is_dynamic
    kind = TokenRecyclingV1Drafter if is_dynamic else TemplateV1Drafter
    return kind(vllm_config, device, runner)


DRAFTERS: dict[str, Callable[[Any, torch.device, Any], V1Drafter]] = {
    TOKEN_RECYCLING: _token_recycling,
    OUROBOROS: OuroborosV1Drafter,
}
