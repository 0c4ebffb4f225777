"""The options of `token_recycling` with a `trunk`: one of vLLM's own methods drafts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from vllm_recycle.core.state_file import is_int, shorten
from vllm_recycle.core.tree import MAX_CHAIN
from vllm_recycle.core.trunk import CHOICES
from vllm_recycle.integration.options.base import expect
from vllm_recycle.integration.options.ouroboros import OUROBOROS
from vllm_recycle.integration.options.token_recycling import DYNAMIC, TokenRecyclingOptions

LENGTH = "num_speculative_tokens"
# Tokens of a trunk where the user says nothing: a method that costs nothing may draft longer ones.
DEFAULT_LENGTH, DEFAULT_LENGTHS = 4, {"ngram": 5, "ngram_gpu": 5, "suffix": 16}
# Keys of vLLM's about a model that drafts, and the blocks of its prompts.
MODEL_KEYS = ("model", "revision", "code_revision", "draft_tensor_parallel_size")
LOADING_KEYS = (*MODEL_KEYS, "quantization", "moe_backend", "draft_load_config")
HEAD_KEYS = (*LOADING_KEYS, "disable_eagle_block_drop", "disable_lookahead_block_hashes")
LOOKUP_KEYS = ("prompt_lookup_min", "prompt_lookup_max")
SUFFIX_KEYS = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
# The methods of vLLM that draft a chain place by place, and their keys. vLLM's other keys would do
# nothing here, or break a step: trees replace how it verifies, samples and counts drafts.
KEYS = {
    "eagle": HEAD_KEYS,
    "eagle3": HEAD_KEYS,
    "mtp": HEAD_KEYS,
    "medusa": MODEL_KEYS,
    "ngram": LOOKUP_KEYS,
    "ngram_gpu": LOOKUP_KEYS,
    "suffix": SUFFIX_KEYS,
}
# Keys of every trunk that have one value, which is vLLM's default.
FIXED = {
    "draft_sample_method": "greedy",
    "rejection_sample_method": "standard",
    "parallel_drafting": False,
    "disable_padded_drafter_batch": False,
    "use_local_argmax_reduction": False,
    "enable_adaptive_verification": False,
}


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
        self._check_trunk_keys()
        is_length = is_int(length, 1, MAX_CHAIN)
        expect(f"{LENGTH} of trunk", length, is_length, f"an integer 1 to {MAX_CHAIN}")
        for key, fixed_value in FIXED.items():
            is_fixed = trunk.get(key) in (None, fixed_value)
            expect(f"{key} of trunk", trunk.get(key), is_fixed, f"none or {fixed_value!r}")
        expect("tree", self.tree, self.tree == DYNAMIC, f"{DYNAMIC!r} with a trunk")
        if method == "suffix" and self.isolates:
            raise ValueError(
                "speculative_config: method of trunk is 'suffix' with scope 'isolated', expected "
                "another of them: it drafts from what other requests said"
            )
        expect("k", self.k, self.k >= CHOICES, f"at least the {CHOICES} choices at a place of it")

    def _check_trunk_keys(self) -> None:
        """Refuse a method that drafts no chain, and keys that it does not take."""
        from vllm.config.speculative import MTPModelTypes, SpeculativeMethod  # takes a second

        method = self.trunk["method"]
        methods = [name for name in KEYS if name in get_args(SpeculativeMethod)]
        is_mtp = method in get_args(MTPModelTypes)  # older names of `mtp`
        expected = f"one of {methods}, or the method {OUROBOROS!r} with a draft model"
        expect("method of trunk", method, method in methods or is_mtp, expected)
        keys = KEYS["mtp" if is_mtp else method]
        accepted = ["method", LENGTH, *keys, *FIXED]
        for key in self.trunk:
            if key not in accepted:
                raise ValueError(
                    f"speculative_config: key {shorten(key)} of trunk, expected any of {accepted}"
                )
        if "model" in keys and not is_mtp:
            model = self.trunk.get("model")
            is_name = isinstance(model, str) and model != ""
            expect("model of trunk", model, is_name, "a path or a name on the hub")

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
        return {k: v for k, v in self.trunk.items() if k != LENGTH and v is not None}
