"""What a request says about speculation, and whether a draft for it may be verified."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError

OPT_OUT = "speculate"
IS_OURS = "is_of_vllm_recycle"  # an attribute of vLLM's speculative configuration


def is_ours(speculative_config: Any) -> bool:
    """Whether an engine's speculative configuration is one of ours."""
    return hasattr(speculative_config, IS_OURS)


def may_speculate(params: Any, *, on_v2: bool) -> bool:
    """Whether drafts for a request may be verified, as far as its sampling parameters tell.

    On Model Runner V2 they may not where sampling looks back on the output: its kernels for
    penalties and bad words take the rows before a row for its ancestors.
    """
    penalties = params.presence_penalty or params.frequency_penalty
    looks_back = params.repetition_penalty != 1.0 or penalties or params.bad_words
    return bool(_says(params.extra_args or {})) and not (on_v2 and looks_back)


def validate_sampling_params(params: Any, speculative_config: Any) -> bool:
    """Judge a request's parameters where the engine runs one of ours; see `versions`.

    Every sampling parameter is exact under the tree walk, `min_p` and `logit_bias` included.
    Refused are opt-outs that are neither true nor false.
    """
    if not is_ours(speculative_config):
        return False
    speculate = _says(params.extra_args or {})
    if speculate not in (True, False):  # 0 and 1 too: vLLM's server makes these of false and true
        raise VLLMValidationError(
            f"extra_args: {OPT_OUT!r} is {speculate!r}, expected true or false",
            parameter="extra_args",
            value=speculate,
        )
    return True


def _says(extra_args: dict[Any, Any]) -> Any:
    # None says nothing: rows of Ray Data have all fields that any of them has.
    said = extra_args.get(OPT_OUT)
    return True if said is None else said
