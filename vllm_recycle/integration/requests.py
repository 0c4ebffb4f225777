"""What a request may say about our methods: that it is to be decoded without speculation."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

from vllm.exceptions import VLLMValidationError

OPT_OUT = "speculate"
ALIKE = 0.85  # of `SequenceMatcher`: a letter too many, too few, wrong, or two of them swapped
IS_OURS = "is_of_vllm_recycle"  # an attribute of vLLM's speculative configuration


def is_ours(speculative_config: Any) -> bool:
    """Whether an engine's speculative configuration is one that `engine_config` completed."""
    return hasattr(speculative_config, IS_OURS)


def opts_out(params: Any) -> bool:
    """Whether a request, by its sampling parameters, is to be decoded without speculation."""
    return not _says(params.extra_args or {})


def validate_sampling_params(params: Any, speculative_config: Any) -> bool:
    """Judge a request's parameters where the engine runs one of ours; see `versions`.

    Every sampling parameter is exact under the tree walk, `min_p` and `logit_bias` included.

    Raises:
        VLLMValidationError: an opt-out that is neither true nor false, or a key that is all but it;
            a budget of tokens to think with.

    """
    if not is_ours(speculative_config):
        return False
    given = params.extra_args or {}
    for key in given:
        if key != OPT_OUT and _is_misspelt(key):
            raise VLLMValidationError(
                f"extra_args: unknown key {key!r}, expected {OPT_OUT!r}",
                parameter="extra_args",
                value=key,
            )
    speculate = _says(given)
    if speculate not in (True, False):  # 0 and 1 too: vLLM's server makes these of false and true
        raise VLLMValidationError(
            f"extra_args: {OPT_OUT!r} is {speculate!r}, expected true or false",
            parameter="extra_args",
            value=speculate,
        )
    if params.thinking_token_budget is not None:
        raise VLLMValidationError(
            f"thinking_token_budget: got {params.thinking_token_budget}, expected none: the "
            "--speculative-config of this engine does not support it",
            parameter="thinking_token_budget",
            value=params.thinking_token_budget,
        )
    return True


def _says(extra_args: dict[Any, Any]) -> Any:
    # None is not said: Ray Data's rows have all fields that any of them has.
    said = extra_args.get(OPT_OUT)
    return True if said is None else said


def _is_misspelt(key: Any) -> bool:
    """Whether a key is meant for us; what is less alike belongs to others."""
    if not isinstance(key, str) or abs(len(key) - len(OPT_OUT)) > 2:
        return False
    return SequenceMatcher(None, key.casefold(), OPT_OUT).ratio() >= ALIKE
