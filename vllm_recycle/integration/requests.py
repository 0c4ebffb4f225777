"""What a request says about speculation, and whether a draft for it may be verified.

A hint is what its output may say, or be like: the tokens of it enter the adjacency matrix as those
of the prompt do, as the request's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingType

from vllm_recycle.core.adjacency import GREEDY, MAX_CONTEXT, SAMPLED
from vllm_recycle.core.state_file import shorten
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.options import TokenRecyclingOptions, settings_of

OPT_OUT = "speculate"
HINT = "hint"
PREDICTION = "prediction"  # OpenAI's field of a chat completion, which is a hint too
IS_OURS = "is_of_vllm_recycle"  # an attribute of vLLM's speculative configuration


def is_ours(speculative_config: Any) -> bool:
    """Whether an engine's speculative configuration is one of ours."""
    return hasattr(speculative_config, IS_OURS)


def class_of(params: SamplingParams) -> int:
    """The class of a request, by which acceptance is counted."""
    return GREEDY if params.sampling_type == SamplingType.GREEDY else SAMPLED


def may_speculate(params: Any, *, sees_paths: bool = True) -> bool:
    """Whether drafts for a request may be verified, as far as its sampling parameters tell.

    A thinking budget looks back on the output, and must see of a row the path that leads to it: on
    Model Runner V2 vLLM's kernel for it takes the rows before a row for its ancestors, as in a
    chain.
    """
    looks_back = params.thinking_token_budget is not None
    return bool(_says(params.extra_args or {})) and (sees_paths or not looks_back)


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


def read_hint(processor: Any, params: Any) -> None:
    """Put token ids in the place of a hint, where the tokenizer is; see `versions`.

    `processor` is vLLM's `InputProcessor`; `params` are a request's, changed in place. Raises
    VLLMValidationError for a hint that is none, or that the method has no use for.
    """
    extra_args = params.extra_args or {}
    hints = {key: extra_args.get(key) for key in (HINT, PREDICTION)}
    hints = {key: value for key, value in hints.items() if value is not None}
    if not hints or not is_ours(processor.vllm_config.speculative_config):
        return
    try:
        token_ids = _tokens_of_hint(processor, hints)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter=next(iter(hints))) from None
    if token_ids is not None:
        params.extra_args = {**extra_args, PREDICTION: None, HINT: token_ids}


def _tokens_of_hint(processor: Any, hints: dict[str, Any]) -> list[int] | None:
    """Those of what a request gives by these names; None where it is left unread."""
    options = settings_of(processor.vllm_config).options
    if not isinstance(options, TokenRecyclingOptions):
        if HINT in hints:  # a prediction is left unread, as vLLM does
            expected = f"none: the method {options.method} as published has no use for it"
            raise _bad(HINT, hints[HINT], expected)
        return None
    if len(hints) > 1:
        raise _bad(PREDICTION, hints[PREDICTION], f"none beside {HINT!r}")
    ((name, hint),) = hints.items()
    model_config = processor.model_config
    vocab_size, most = model_config.get_vocab_size(), model_config.max_model_len
    content = _content(hint) if name == PREDICTION else hint
    token_ids = to_token_ids(content, name, processor.tokenizer, vocab_size, most=most)
    if len(token_ids) > most:
        raise _bad(name, hint, f"at most the {most} tokens of max_model_len")
    return token_ids


def to_token_ids(
    given: Any, name: str, tokenizer: Any, vocab_size: int, *, most: int | None = None
) -> list[int]:
    """The token ids of a text, or those that were given in its place.

    Of a text that has more than `most` it need not be all. Raises ValueError with the `name` of
    what was given.
    """
    if isinstance(given, str) and tokenizer is not None:
        longest = None if most is None else most * tokenizer.max_chars_per_token + 1
        return tokenizer.encode(given[:longest], add_special_tokens=False)
    is_list = isinstance(given, list) and all(type(token_id) is int for token_id in given)
    if is_list and all(0 <= token_id < vocab_size for token_id in given):
        return given
    ids = f"a list of token ids from 0 to {vocab_size - 1}"
    raise _bad(name, given, f"{'a text or ' if tokenizer is not None else ''}{ids}")


def hinted_text(params: Any, token_ids: Sequence[int]) -> list[int]:
    """The hint of a request as it may follow its text; empty where it has none."""
    hint = (params.extra_args or {}).get(HINT)
    return [*token_ids[-MAX_CONTEXT:], *hint] if isinstance(hint, list) else []


def with_holes(
    token_ids: Sequence[int], request: Any, *, is_encoder_decoder: bool
) -> Sequence[int]:
    """The text of a request, with -1 where its input is no token: images, embeddings.

    Args:
        token_ids: the text, prompt first; of the decoder, where there is an encoder.
        request: vLLM's, as its scheduler sends it or as a runner keeps it.
        is_encoder_decoder: whether images and the like go to an encoder.

    """
    if request.prompt_token_ids is None:
        holes = [*range(len(request.prompt_embeds))]
    else:
        features = () if is_encoder_decoder else request.mm_features
        places = [feature.mm_position for feature in features]
        holes = [place.offset + at for place in places for at in range(place.length)]
        is_token = request.prompt_is_token_ids or ()
        holes += [at for at, token in enumerate(is_token) if not token]
    if not holes:
        return token_ids
    text = [*token_ids]
    for at in holes:
        text[at] = NO_TOKEN
    return text


def _content(prediction: Any) -> str:
    """The text of what OpenAI's clients send: a string, or parts of it."""
    try:
        content = prediction["content"]
        return content if isinstance(content, str) else "".join(part["text"] for part in content)
    except (TypeError, KeyError):
        expected = "{'type': 'content', 'content': TEXT}, where TEXT may be parts with a 'text'"
        raise _bad(PREDICTION, prediction, expected) from None


def _bad(name: str, given: Any, expected: str) -> ValueError:
    return ValueError(f"{name!r} is {shorten(given)}, expected {expected}")
