"""What a user may write in `--speculative-config` for our methods, and what it means.

Options travel to every process of an engine in `additional_config`, as plain values.
"""

from __future__ import annotations

from vllm_recycle.integration.options.base import MethodOptions
from vllm_recycle.integration.options.ouroboros import OUROBOROS, OuroborosOptions
from vllm_recycle.integration.options.token_recycling import (
    TOKEN_RECYCLING,
    TokenRecyclingOptions,
)

METHODS: dict[str, type[MethodOptions]] = {
    kind.method: kind for kind in (TokenRecyclingOptions, OuroborosOptions)
}

__all__ = [
    "METHODS",
    "OUROBOROS",
    "TOKEN_RECYCLING",
    "MethodOptions",
    "OuroborosOptions",
    "TokenRecyclingOptions",
]
