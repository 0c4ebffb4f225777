"""The drafters on Model Runner V2, by the options of their method."""

from __future__ import annotations

from vllm_recycle.integration.cuda.drafter import V2Drafter
from vllm_recycle.integration.cuda.hosted_trunk import HostedTrunkV2Drafter
from vllm_recycle.integration.cuda.ouroboros.drafter import OuroborosV2Drafter
from vllm_recycle.integration.cuda.ouroboros.trunk import TrunkV2Drafter
from vllm_recycle.integration.cuda.token_recycling import TokenRecyclingV2Drafter
from vllm_recycle.integration.options import (
    HostedTrunkOptions,
    MethodOptions,
    OuroborosOptions,
    TokenRecyclingOptions,
    TrunkOptions,
)

DRAFTERS: dict[type[MethodOptions], type[V2Drafter]] = {
    TokenRecyclingOptions: TokenRecyclingV2Drafter,
    OuroborosOptions: OuroborosV2Drafter,
    TrunkOptions: TrunkV2Drafter,
    HostedTrunkOptions: HostedTrunkV2Drafter,
}
