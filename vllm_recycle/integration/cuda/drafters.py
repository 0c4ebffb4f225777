"""The drafters on Model Runner V2, by what drafts."""

from __future__ import annotations

from importlib import import_module

from vllm_recycle.integration.cuda.drafter import V2Drafter
from vllm_recycle.integration.options import MethodOptions
from vllm_recycle.integration.options.base import HOSTED_TRUNK, MATRIX, OWN_TRUNK, PHRASES

# Not imported before they are used: what some need of vLLM, not all supported versions have.
DRAFTERS: dict[str, str] = {
    MATRIX: "token_recycling.TokenRecyclingV2Drafter",
    PHRASES: "ouroboros.drafter.OuroborosV2Drafter",
    OWN_TRUNK: "ouroboros.drafter.TrunkV2Drafter",
    HOSTED_TRUNK: "hosted_trunk.HostedTrunkV2Drafter",
}


def drafter_class(options: MethodOptions) -> type[V2Drafter]:
    """The class of drafter for these options."""
    module, _, name = DRAFTERS[options.source].rpartition(".")
    return getattr(import_module(f"{__package__}.{module}"), name)
