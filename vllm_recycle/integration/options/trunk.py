"""The options of the method `ouroboros`, whose trees grow along the trunk of a draft model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_recycle.core.grow import LEVELS
from vllm_recycle.core.state_file import is_int
from vllm_recycle.core.trunk import CHOICES
from vllm_recycle.integration.options.base import expect
from vllm_recycle.integration.options.ouroboros import DraftModelOptions
from vllm_recycle.integration.options.token_recycling import DYNAMIC, TokenRecyclingOptions

MAX_GAMMA = 16


@dataclass(frozen=True, kw_only=True)
class TrunkOptions(DraftModelOptions, TokenRecyclingOptions):
    """Those of Token Recycling, whose trees grow along the trunk of a draft model."""

    state_key = "matrix_file"
    other_keys = ("num_speculative_tokens",)

    gamma: int = 4

    @classmethod
    def _defaults(cls, config: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
        return super()._defaults(config, on_gpu=on_gpu) | {"gamma": cls.gamma}

    def check(self) -> None:
        super().check()
        is_size = is_int(self.gamma, 1, MAX_GAMMA)
        expect("gamma", self.gamma, is_size, f"an integer 1 to {MAX_GAMMA}")
        expect("tree", self.tree, self.tree == DYNAMIC, f"{DYNAMIC!r}")
        expect("k", self.k, self.k >= CHOICES, f"at least the {CHOICES} choices of a draft model")

    @property
    def draft_rows(self) -> int:
        return 2 * self.gamma


def head_length(options: TrunkOptions) -> int:
    """Rows of a draft forward on a GPU: the root, the longest path, and the token behind that."""
    return 1 + min(LEVELS, options.num_nodes) + 1
