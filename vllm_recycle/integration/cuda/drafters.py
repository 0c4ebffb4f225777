"""The drafters on Model Runner V2, by the options of their method."""

from __future__ import annotations

from importlib import import_module

from vllm_recycle.integration.cuda.drafter import V2Drafter
from vllm_recycle.integration.options import (
    HostedTrunkOptions,
    MethodOptions,
    OuroborosOptions,
    TokenRecyclingOptions,
    TrunkOptions,
)

# Not imported before they are used: what some need of vLLM, not all supported versions have.
DRAFTERS: dict[type[MethodOptions], str] = {
    TokenRecyclingOptions: "token_recycling.TokenRecyclingV2Drafter",
    OuroborosOptions: "ouroboros.drafter.OuroborosV2Drafter",
    TrunkOptions: "ouroboros.drafter.TrunkV2Drafter",
    HostedTrunkOptions: "hosted_trunk.HostedTrunkV2Drafter",
}


def drafter_class(options: MethodOptions) -> type[V2Drafter]:
    """The class of drafter for these options."""
    module, _, name = DRAFTERS[type(options)].rpartition(".")
    return getattr(import_module(f"{__package__}.{module}"), name)
