"""Replaced functions of vLLM that requests meet, in processes that have an engine of ours.

See `shims`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_recycle.integration.start.shims import replace_function
from vllm_recycle.integration.start.versions import FEATURES


class Prediction(dict):
    """OpenAI's field of a chat completion. Logs of parameters do not show its text."""

    def __repr__(self) -> str:
        return "{...}"


def wrap_process_inputs(process_inputs: Callable[..., Any]) -> None:
    """Let requests bring hints and owners, and read them where the tokenizer is.

    `process_inputs`, given vLLM's function first, puts token ids in the place of texts. OpenAI's
    `prediction`, which vLLM takes and leaves unread, becomes one of the parameters.

    Remove when plugins may see a request before it is sent to the engine.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.v1.engine.input_processor import InputProcessor

    def to_sampling_params(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        params = original(self, *args, **kwargs)
        if (prediction := (self.model_extra or {}).get("prediction")) is not None:
            if isinstance(prediction, dict):
                prediction = Prediction(prediction)
            params.extra_args = {**(params.extra_args or {}), "prediction": prediction}
        return params

    replace_function(InputProcessor, "process_inputs", process_inputs)
    replace_function(ChatCompletionRequest, "to_sampling_params", to_sampling_params)


def wrap_do_tracing(attributes_of: Callable[[Any], dict[str, Any]]) -> None:
    """Let the span of a request say more.

    `attributes_of` says what, given vLLM's state of a request that has ended.

    Remove when vLLM says what was drafted and accepted (patches/0007).
    """
    from vllm.v1.engine import output_processor

    span_attributes: dict[str, Any] = {}

    def make_span(original: Any, *args: Any, attributes: dict[str, Any], **kwargs: Any) -> Any:
        return original(*args, attributes=attributes | span_attributes, **kwargs)

    def do_tracing(original: Any, self: Any, output: Any, req_state: Any, *args: Any) -> None:
        span_attributes.update(attributes_of(req_state))
        try:
            original(self, output, req_state, *args)
        finally:
            span_attributes.clear()

    replace_function(output_processor, "instrument_manual", make_span)
    replace_function(output_processor.OutputProcessor, "do_tracing", do_tracing)


def wrap_streams(streaming: Any) -> None:
    """Let a server that parses tool calls or reasoning give its parser a step's tokens one by one.

    `streaming` has what takes the place of vLLM's detokenizer of a streaming request, what a
    request of a server that parses is answered from, and what its parser makes of that.

    Other servers, engines and workers are left as they are: this waits until a parser is made.
    Remove when vLLM's parsers do not depend on how a text is cut into deltas.
    """
    from vllm.parser import ParserManager

    def get_parser(original: Any, *args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        if parser is not None:
            replace_function(parser, "parse_delta", streaming.parse_delta)
            _wrap_servers(streaming)
        return parser

    replace_function(ParserManager, "get_parser", get_parser)


def _wrap_servers(streaming: Any) -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    def from_new_request(original: Any, tokenizer: Any, request: Any) -> Any:
        detokenizer = original(tokenizer, request)
        streams = request.sampling_params.output_kind is RequestOutputKind.DELTA
        return streaming.Detokenizer(detokenizer) if streams else detokenizer

    def chat(original: Any, self: Any, request: Any, results: Any, *args: Any, **kw: Any) -> Any:
        results = streaming.by_token(self, self.parser_cls, request, results)
        return original(self, request, results, *args, **kw)

    def respond(
        original: Any, self: Any, request: Any, params: Any, contexts: Any, *args: Any
    ) -> Any:
        contexts = streaming.by_token(self, self.parser, request, contexts)
        return original(self, request, params, contexts, *args)

    # Since vLLM 0.33 servers of other APIs, as Anthropic's, call one that makes no text of chunks.
    chat_generator = "chat_completion_stream_generator"
    if hasattr(OpenAIServingChat, f"{chat_generator}_raw"):
        chat_generator += "_raw"
    replace_function(IncrementalDetokenizer, "from_new_request", from_new_request)
    replace_function(OpenAIServingChat, chat_generator, chat)
    replace_function(OpenAIServingResponses, "_process_simple_streaming_events", respond)


def wrap_request_stats(stats: Any) -> None:
    """Count what requests get by `stats`, which has what takes the place of vLLM's functions.

    vLLM counts the tokens of a step before it drops those behind a stop string: remove `trim` when
    it counts afterwards, and the rest when it has such a histogram.
    """
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    replace_function(OutputProcessor, "_update_stats_from_output", stats.count_step)
    if FEATURES.trims_surplus_tokens:
        replace_function(OutputProcessor, "_trim_surplus_tokens", stats.trim)
    replace_function(OutputProcessor, "_update_stats_from_finished", stats.finish)
    replace_function(PrometheusStatLogger, "__init__", stats.add_histogram)


def trim_behind_stop_strings() -> None:
    """Drop what a step has behind a stop string from its outputs. Remove when 0.31 is dropped.

    In a process that has an engine of ours, vLLM's own speculation loses such tokens too.
    """
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
    from vllm.v1.engine.logprobs import LogprobsProcessor

    def update(original: Any, self: Any, token_ids: list[int], stopped: bool) -> str | None:
        for end in range(1, len(token_ids)) if self.stop else ():
            stop_string = original(self, token_ids[end - 1 : end], False)
            if stop_string is not None:
                del token_ids[end:]
                return stop_string
        return original(self, token_ids[-1:] if self.stop else token_ids, stopped)

    def update_from_output(original: Any, self: Any, output: Any) -> None:
        if output.new_logprobs is not None:
            logprobs = output.new_logprobs.slice_request(0, len(output.new_token_ids))
            output.new_logprobs = logprobs
        original(self, output)

    if not FEATURES.trims_surplus_tokens:
        replace_function(BaseIncrementalDetokenizer, "update", update)
        replace_function(LogprobsProcessor, "update_from_output", update_from_output)
