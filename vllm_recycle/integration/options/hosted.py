"""The options of `token_recycling` with a `trunk`: one of vLLM's own methods drafts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_recycle.core.state_file import is_int
from vllm_recycle.core.tree import MAX_CHAIN
from vllm_recycle.core.trunk import CHOICES
from vllm_recycle.integration.options.base import expect
from vllm_recycle.integration.options.token_recycling import DYNAMIC, TokenRecyclingOptions

LENGTH = "num_speculative_tokens"
# Tokens of a trunk where the user says nothing: a method that costs nothing may draft longer ones.
DEFAULT_LENGTH, DEFAULT_LENGTHS = 4, {"ngram": 5, "ngram_gpu": 5, "suffix": 16}
# What has no place in a trunk: methods of ours, those that draft nothing, and those that draft all
# places at once.
NO_TRUNKS = (
    *("token_recycling", "ouroboros", "custom_class", "extract_hidden_states"),
    *("dflash", "dspark"),
)
# Keys of a trunk that have one value.
FIXED = {"parallel_drafting": False, "draft_sample_method": "greedy"}


@dataclass(frozen=True, kw_only=True)
class HostedTrunkOptions(TokenRecyclingOptions):
    """Those of Token Recycling, whose trees grow along the trunk of another method.

    Attributes:
        trunk: a speculative configuration of vLLM's; its `num_speculative_tokens` are those of a
            trunk.
    """

    other_keys = ("num_speculative_tokens",)

    trunk: Mapping[str, Any]

    def check(self) -> None:
        super().check()
        trunk = self.trunk
        is_config = isinstance(trunk, Mapping) and isinstance(trunk.get("method"), str)
        expect("trunk", trunk, is_config, 'an object with "method", one of vLLM\'s methods')
        method, length = trunk["method"], self._given_length
        expect("method of trunk", method, method not in NO_TRUNKS, "a method of vLLM's that drafts")
        is_length = is_int(length, 1, MAX_CHAIN)
        expect(f"{LENGTH} of trunk", length, is_length, f"an integer 1 to {MAX_CHAIN}")
        for key, value in FIXED.items():
            given = trunk.get(key)
            expect(f"{key} of trunk", given, given in (None, value), f"none or {value!r}")
        expect("tree", self.tree, self.tree == DYNAMIC, f"{DYNAMIC!r} with a trunk")
        if method == "suffix" and self.isolates:
            raise ValueError(
                "speculative_config: method of trunk is 'suffix' with scope 'isolated', expected "
                "another of them: it drafts from what other requests said"
            )
        expect("k", self.k, self.k >= CHOICES, f"at least the {CHOICES} choices at a place of it")

    @property
    def _given_length(self) -> int:
        default = DEFAULT_LENGTHS.get(self.trunk["method"], DEFAULT_LENGTH)
        length = self.trunk.get(LENGTH)
        return default if length is None else length

    @property
    def trunk_length(self) -> int:
        """The most tokens of a trunk: no longer one than a draft has nodes."""
        return min(self._given_length, self.num_nodes)

    def host_config(self) -> dict[str, Any]:
        return {key: value for key, value in self.trunk.items() if key != LENGTH}
