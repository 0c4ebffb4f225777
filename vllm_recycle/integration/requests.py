"""What a request says about speculation, and whether a draft for it may be verified."""

from __future__ import annotations

import json
from typing import Any

from vllm.exceptions import VLLMValidationError

OPT_OUT = "speculate"
# Sampling parameters that look back on the output, and what they are where they do not.
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
IS_OURS = "is_of_vllm_recycle"  # an attribute of vLLM's speculative configuration


def is_ours(speculative_config: Any) -> bool:
    """Whether an engine's speculative configuration is one of ours."""
    return hasattr(speculative_config, IS_OURS)


def may_speculate(params: Any, *, on_v2: bool) -> bool:
    """Whether drafts for a request may be verified, as far as its sampling parameters tell.

    On Model Runner V2 they may not where sampling looks back on the output: its kernels for
    penalties and bad words take the rows before a row for its ancestors.
    """
    penalties = any(getattr(params, name) != neutral for name, neutral in PENALTIES.items())
    looks_back = penalties or params.bad_words
    return bool(_says(params.extra_args or {})) and not (on_v2 and looks_back)


def penalties_without_drafts(model_config: Any) -> str | None:
    """Which penalties an engine's requests have by default, and so no drafts on Model Runner V2.

    vLLM takes them from the model; None where there are none.
    """
    defaults = model_config.get_diff_sampling_param()
    found = {
        name: defaults[name]
        for name, neutral in PENALTIES.items()
        if defaults.get(name, neutral) != neutral
    }
    if not found:
        return None
    penalties = " and ".join(f"a {name} of {value}" for name, value in found.items())
    neutral = json.dumps({name: PENALTIES[name] for name in found})
    return (
        f"requests that have {penalties}, from the model's generation_config.json, get no drafts "
        f"on a GPU: let them set their own, or start with --override-generation-config '{neutral}'"
    )


def validate_sampling_params(params: Any, speculative_config: Any) -> bool:
    """Judge a request's parameters where the engine runs one of ours; see `versions`.

    Every sampling parameter is exact under the tree walk, `min_p` and `logit_bias` included.
    Refused are opt-outs that are neither true nor false, and a budget of tokens to think with.
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
    if params.thinking_token_budget is not None:
        raise VLLMValidationError(
            f"thinking_token_budget: got {params.thinking_token_budget}, expected none: the "
            "--speculative-config of this engine does not support it",
            parameter="thinking_token_budget",
            value=params.thinking_token_budget,
        )
    return True


def _says(extra_args: dict[Any, Any]) -> Any:
    # None says nothing: rows of Ray Data have all fields that any of them has.
    said = extra_args.get(OPT_OUT)
    return True if said is None else said
