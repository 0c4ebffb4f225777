"""What a request says about speculation, and whether a draft for it may be verified.

A hint is what its output may say, or be like: the tokens of it enter the adjacency matrix as those
of the prompt do, as the request's own. Requests of one owner have their own entries together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingType

from vllm_recycle.core.adjacency import GREEDY, MAX_CONTEXT, SAMPLED
from vllm_recycle.core.owners import Owner
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.state_file import is_int, shorten
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.options import MethodOptions, settings_of

OPT_OUT = "speculate"
HINT = "hint"
OWNER = "owner"
PREDICTION = "prediction"  # OpenAI's field of a chat completion, which is a hint too
SECRET = "***"  # in the place of a cache salt, which must not get into logs
MAX_NAME, MAX_HINTS = 256, 64
PIECE = 1 << 16  # characters that are tokenized at a time
SURROGATE = re.compile(r"[\ud800-\udfff]")
IS_OURS = "is_of_vllm_recycle"  # an attribute of vLLM's speculative configuration


def is_ours(speculative_config: Any) -> bool:
    """Whether an engine's speculative configuration is one of ours."""
    return hasattr(speculative_config, IS_OURS)


def new_request(
    req_state_idx: int,
    token_ids: Sequence[int],
    params: SamplingParams,
    owner: Owner | None,
    model_config: Any,
) -> NewRequest:
    """What a drafter is told of a request with a text and sampling parameters.

    The text of a request without drafts is taken in for its owner alone, if it has one.
    """
    request_class = GREEDY if params.sampling_type == SamplingType.GREEDY else SAMPLED
    has_drafts = may_speculate(params) and params.max_tokens != 1
    hint = _hint(params, token_ids, model_config) if has_drafts else ()
    teaches = has_drafts or owner is not None
    return NewRequest(req_state_idx, token_ids, request_class, owner, hint, teaches)


def may_speculate(params: Any) -> bool:
    """Whether drafts for a request may be verified, as far as its sampling parameters tell."""
    return bool(_says(params.extra_args or {}))


def looks_back(params: Any) -> bool:
    """Whether bad words or a thinking budget look back on the output of a request.

    On Model Runner V2 vLLM's kernels for these take all rows before a row for its ancestors. So
    they are in a chain. Penalties look back too, and see the path to a row.
    """
    return bool(params.bad_words_token_ids) or params.thinking_token_budget is not None


def validate_spec_decode(original: Any, params: Any, speculative_config: Any) -> None:
    """Judge a request's parameters where the engine runs one of ours, else as vLLM; see `shims`.

    Every sampling parameter is exact under the tree walk, `min_p` and `logit_bias` included.
    Refused are opt-outs that are neither true nor false.
    """
    if not is_ours(speculative_config):
        original(params, speculative_config)
        return
    speculate = _says(params.extra_args or {})
    if speculate not in (True, False):  # 0 and 1 too: vLLM's server makes these of false and true
        raise VLLMValidationError(
            f"extra_args: {OPT_OUT!r} is {speculate!r}, expected true or false",
            parameter="extra_args",
            value=speculate,
        )


def _says(extra_args: dict[Any, Any]) -> Any:
    # None says nothing: rows of Ray Data have all fields that any of them has.
    speculate = extra_args.get(OPT_OUT)
    return True if speculate is None else speculate


def process_inputs(original: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    """As vLLM; and check whose a request is, and put token ids in the place of hints.

    See `requests.shims`. `processor` is vLLM's `InputProcessor`. Raises VLLMValidationError for
    what is no owner or hint, or what the method has no use for.
    """
    request, config = original(processor, *args, **kwargs), processor.vllm_config
    if request.sampling_params is None or not is_ours(config.speculative_config):
        return request
    params, options = request.sampling_params, settings_of(config).options
    extra_args = params.extra_args or {}
    hints = {key: extra_args[key] for key in (HINT, PREDICTION) if extra_args.get(key) is not None}
    try:
        _check_owner_with(options, extra_args.get(OWNER), request.cache_salt)
        token_ids = _tokens_of_hints(processor, hints, options) if hints else None
    except _BadInputError as error:
        raise VLLMValidationError(str(error), parameter=error.args[0]) from None
    if hints:  # a prediction that is left unread is not sent to the engine
        params.extra_args = {**extra_args, PREDICTION: None, HINT: token_ids}
    return request


def owner_of(request: Any) -> Owner | None:
    """Whose a request of vLLM's scheduler is.

    What no frontend has checked and is no name counts as none.
    """
    name, salt = (request.sampling_params.extra_args or {}).get(OWNER), request.cache_salt
    if not _is_name(name):
        name = None
    if not salt or not _is_utf8(salt):  # an empty one is none for vLLM
        if name is None and request.resumable:
            return Owner(request.request_id, is_session=True)
        return None if name is None else Owner(name)
    return Owner(digest(salt) if name is None else name, digest(salt))


def digest(cache_salt: str) -> str:
    """What an engine knows a cache salt by, which is a secret."""
    return sha256(cache_salt.encode()).hexdigest()


def _check_owner_with(options: MethodOptions, name: Any, cache_salt: str | None) -> None:
    """Raise ValueError for an owner or a cache salt that a method cannot do justice to."""
    if name is not None:
        check_owner(name)
        if not options.has_owners or options.scope == "shared":
            expected = f"none: the method {options.method} with scope {options.scope!r} has none"
            raise _BadInputError(OWNER, name, expected)
    if not cache_salt:
        return
    if not _is_utf8(cache_salt):
        raise _BadInputError("cache_salt", SECRET, "a text in UTF-8")
    if reason := options.ignores_salts:
        raise _BadInputError("cache_salt", SECRET, f"none: {reason}")


def _is_name(name: Any) -> bool:
    if isinstance(name, str):
        return 0 < len(name) <= MAX_NAME and _is_utf8(name)
    return type(name) is int and abs(name) < 1 << 63


def _is_utf8(text: str) -> bool:
    """Whether a text can be sent: half of a surrogate pair, which JSON can spell, cannot."""
    return SURROGATE.search(text) is None


def check_owner(name: Any) -> None:
    """Raise ValueError for what is no name of an owner."""
    if not _is_name(name):
        expected = f"an integer of 64 bits, or a text of 1 to {MAX_NAME} characters in UTF-8"
        raise _BadInputError(OWNER, name, expected)


def _tokens_of_hints(
    processor: Any, hints: dict[str, Any], options: MethodOptions
) -> list[list[int]] | None:
    """Those of what a request gives by these names; None where it is left unread."""
    if not options.takes_texts:
        if HINT in hints:  # a prediction is left unread, as vLLM does
            expected = f"none: the method {options.method} as published has no use for it"
            raise _BadInputError(HINT, hints[HINT], expected)
        return None
    if len(hints) > 1:
        raise _BadInputError(PREDICTION, hints[PREDICTION], f"none beside {HINT!r}")
    ((name, value),) = hints.items()
    hint_list = [_content(value)] if name == PREDICTION else _each_hint(value)
    model_config, tokenizer = processor.model_config, processor.tokenizer
    vocab_size, token_budget = model_config.get_vocab_size(), model_config.max_model_len
    token_ids = []
    for hint in hint_list:
        token_ids.append(to_token_ids(hint, name, tokenizer, vocab_size, limit=token_budget))
        token_budget -= len(token_ids[-1])
        if token_budget < 0:
            limit = model_config.max_model_len
            raise _BadInputError(name, value, f"at most the {limit} tokens of max_model_len")
    return token_ids


def _each_hint(value: Any) -> list[Any]:
    """Several hints, or the one that there is."""
    is_several = isinstance(value, list) and any(isinstance(hint, (str, list)) for hint in value)
    if is_several and len(value) > MAX_HINTS:
        raise _BadInputError(HINT, value, f"at most {MAX_HINTS} hints")
    return value if is_several else [value]


def to_token_ids(
    value: Any, name: str, tokenizer: Any, vocab_size: int, *, limit: int | None = None
) -> list[int]:
    """The token ids of a text, or those that were given in its place.

    A token of a text that is none of the model's, such as one for images, becomes -1. Of a text of
    more than `limit` tokens it need not be all. Raises ValueError with the `name` of what was
    given.
    """
    if isinstance(value, str) and tokenizer is not None and _is_utf8(value):
        token_ids: list[int] = []
        # In pieces, since a server waits for this: a text that is too long must not take long.
        for start in range(0, len(value), PIECE):
            piece = tokenizer.encode(value[start : start + PIECE], add_special_tokens=False)
            token_ids += (token if token < vocab_size else NO_TOKEN for token in piece)
            if limit is not None and len(token_ids) > limit:
                break
        return token_ids
    is_list = isinstance(value, list) and all(type(token_id) is int for token_id in value)
    if is_list and all(0 <= token_id < vocab_size for token_id in value):
        return value
    text = "" if tokenizer is None else "a text in UTF-8 or "
    expected = f"{text}a list of token ids from 0 to {vocab_size - 1}"
    raise _BadInputError(name, value, expected)


def _hint(params: Any, token_ids: Sequence[int], model_config: Any) -> list[int]:
    """The hints of a request, each as it may follow its text, with -1 between; empty for none.

    Anything else, which no frontend has checked, counts as none.
    """
    hints = (params.extra_args or {}).get(HINT)
    if not isinstance(hints, list) or not all(isinstance(hint, list) for hint in hints):
        return []
    last_id = model_config.get_vocab_size() - 1
    given_ids = [token_id for hint in hints for token_id in hint]
    if len(hints) > MAX_HINTS or len(given_ids) > model_config.max_model_len:
        return []
    if not all(is_int(token_id, NO_TOKEN, last_id) for token_id in given_ids):
        return []
    parts = ([*token_ids[-MAX_CONTEXT:], *hint] for hint in hints)
    return [token_id for part in parts for token_id in (NO_TOKEN, *part)]


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
        holes = [place.offset + index for place in places for index in range(place.length)]
        is_token = request.prompt_is_token_ids or ()
        holes += [index for index, token in enumerate(is_token) if not token]
    if not holes:
        return token_ids
    text = [*token_ids]
    for index in holes:
        text[index] = NO_TOKEN
    return text


def _content(prediction: Any) -> str:
    """The text of what OpenAI's clients send: a string, or parts of it."""
    try:
        content = prediction["content"]
        return content if isinstance(content, str) else "".join(part["text"] for part in content)
    except (TypeError, KeyError):
        expected = "{'type': 'content', 'content': TEXT}, where TEXT may be parts with a 'text'"
        raise _BadInputError(PREDICTION, prediction, expected) from None


class _BadInputError(ValueError):
    """What a request says by a name is not accepted; made of both, and of what is expected."""

    def __str__(self) -> str:
        name, value, expected = self.args
        return f"{name!r} is {shorten(value)}, expected {expected}"
