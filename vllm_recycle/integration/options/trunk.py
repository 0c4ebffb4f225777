"""The key `trunk` of `token_recycling`: which of vLLM's own methods draft one, and their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from vllm_recycle.core.state_file import is_int, shorten
from vllm_recycle.core.tree import MAX_CHAIN
from vllm_recycle.integration.options.base import (
    DRAFT_MODEL_KEYS,
    LENGTH,
    MODEL_KEYS,
    OUROBOROS,
    expect,
)

DEFAULT_LENGTH = 4  # tokens of a trunk where the user says nothing
# Keys of vLLM's about a model that drafts, and the blocks of its prompts.
LOADING_KEYS = (*DRAFT_MODEL_KEYS, "moe_backend", "draft_load_config")
HEAD_KEYS = (*LOADING_KEYS, "disable_eagle_block_drop", "disable_lookahead_block_hashes")
# The methods of vLLM that draft a chain place by place, and their keys. vLLM's other keys would do
# nothing here, or break a step: trees replace how it verifies, samples and counts drafts.
KEYS = {"eagle": HEAD_KEYS, "eagle3": HEAD_KEYS, "mtp": HEAD_KEYS, "medusa": MODEL_KEYS}
# Keys of every trunk that have one value, which is vLLM's default.
FIXED = {
    "draft_sample_method": "greedy",
    "rejection_sample_method": "standard",
    "parallel_drafting": False,
    "disable_padded_drafter_batch": False,
    "use_local_argmax_reduction": False,
    "enable_adaptive_verification": False,
}


def length_of(trunk: Mapping[str, Any]) -> Any:
    """The most tokens of a trunk, as the user says or by default."""
    length = trunk.get(LENGTH)
    return DEFAULT_LENGTH if length is None else length


def check_trunk(trunk: Any) -> None:
    """Raise ValueError for a method that drafts no chain, keys that it does not take, and values.

    vLLM checks the values of its other keys.
    """
    from vllm.config.speculative import MTPModelTypes, SpeculativeMethod  # takes a second

    is_config = isinstance(trunk, Mapping) and isinstance(trunk.get("method"), str)
    expect("trunk", trunk, is_config, 'an object with "method", one of vLLM\'s methods')
    method, length = trunk["method"], length_of(trunk)
    methods = [name for name in KEYS if name in get_args(SpeculativeMethod)]
    is_mtp = method in get_args(MTPModelTypes)  # older names of `mtp`
    expected = f"one of {methods}, or the method {OUROBOROS!r} with a draft model"
    expect("method of trunk", method, method in methods or is_mtp, expected)
    keys = KEYS["mtp" if is_mtp else method]
    accepted = ["method", LENGTH, *keys, *FIXED]
    for key in trunk:
        if key not in accepted:
            raise ValueError(
                f"speculative_config: key {shorten(key)} of trunk, expected any of {accepted}"
            )
    if not is_mtp:
        model = trunk.get("model")
        is_name = isinstance(model, str) and model != ""
        expect("model of trunk", model, is_name, "a path or a name on the hub")
    is_length = is_int(length, 1, MAX_CHAIN)
    expect(f"{LENGTH} of trunk", length, is_length, f"an integer 1 to {MAX_CHAIN}")
    for key, fixed_value in FIXED.items():
        is_fixed = trunk.get(key) in (None, fixed_value)
        expect(f"{key} of trunk", trunk.get(key), is_fixed, f"none or {fixed_value!r}")
