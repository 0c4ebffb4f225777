"""Which vLLM is supported, and every place where a class or function of it is replaced.

Everything else is a subclass behind one of vLLM's own extension points (`worker_cls`,
`scheduler_cls`, the backend registry, `custom_class` proposers), or an object of an engine of ours,
changed where it is used. A shim is idempotent, changes nothing that engines without our methods
compute, and says when it can go.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

# Not vLLM's `init_logger`: this module works with any vLLM.
logger = logging.getLogger("vllm.recycle")

SUPPORTED_VLLM = ">=0.32,<0.34"
ALLOW_UNTESTED = "VLLM_RECYCLE_ALLOW_UNTESTED_VLLM"

_SHIM = "_vllm_recycle_shim"


def check_vllm_version() -> None:
    """Raise RuntimeError where vLLM is of no supported version, and none was to be tried."""
    try:
        base = Version(vllm.__version__).base_version
        is_supported = SpecifierSet(SUPPORTED_VLLM).contains(base)
    except InvalidVersion:  # "dev": built from sources without tags
        is_supported = False
    if not is_supported and os.environ.get(ALLOW_UNTESTED) != "1":
        raise RuntimeError(
            f"vllm_recycle supports vllm {SUPPORTED_VLLM}, found {vllm.__version__}; set "
            f"{ALLOW_UNTESTED}=1 to try it, untested"
        )


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function of vLLM, once, by one that is given the original first."""
    original = getattr(owner, name)
    if hasattr(original, _SHIM):
        return

    @functools.wraps(original)
    def shim(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(shim, _SHIM, True)
    setattr(owner, name, shim)


def refuse_methods(names: Sequence[str], reason: Exception) -> None:
    """Let `EngineArgs` refuse the methods of these names, and warn, where ours cannot be installed.

    Whatever else vLLM is asked for runs as without us. Raises nothing, and needs nothing of vLLM
    but this one class: it may be any version.
    """
    message = str(reason)
    if not isinstance(reason, RuntimeError):
        message = f"vllm_recycle does not run in vllm {vllm.__version__}: {reason!r}"
    if multiprocessing.parent_process() is None:  # once, and not in each process of an engine
        logger.warning(
            "%s: %s are refused, all else runs as without them", message, " and ".join(names)
        )

    def create_engine_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, "speculative_config", None)
        method = config.get("method") if isinstance(config, Mapping) else None
        if (method or getattr(self, "spec_method", None)) in names:
            raise RuntimeError(message) from reason
        return original(self, *args, **kwargs)

    with contextlib.suppress(ImportError, AttributeError):
        from vllm.engine.arg_utils import EngineArgs

        _replace(EngineArgs, "create_engine_config", create_engine_config)


def wrap_create_engine_config(rewrite: Callable[[Any], Any], finish: Callable[[Any], None]) -> None:
    """Let `EngineArgs` accept our method names in `speculative_config`.

    Args:
        rewrite: from engine arguments to those that vLLM itself accepts, or None where our
            methods are not asked for.
        finish: completes the configuration that vLLM made of those; raises for one that our
            methods do not support.

    Remove when vLLM has a registry of speculative methods.
    """
    from vllm.engine.arg_utils import EngineArgs

    def create_engine_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        rewritten = rewrite(self)
        if rewritten is None:
            return original(self, *args, **kwargs)
        config = original(rewritten, *args, **kwargs)
        if rewritten.speculative_config is not None:
            finish(config)
        return config

    _replace(EngineArgs, "create_engine_config", create_engine_config)


def add_method_names(names: Sequence[str]) -> None:
    """Let `--spec-method` take these names too.

    Remove when vLLM has a registry of speculative methods.
    """
    from vllm.engine.arg_utils import EngineArgs

    def add_cli_args(original: Any, parser: Any) -> Any:
        parser = original(parser)
        for action in parser._actions:
            if action.dest == "spec_method" and action.choices is not None:
                action.choices = [*action.choices, *names]
        return parser

    _replace(EngineArgs, "add_cli_args", add_cli_args)  # static: no `self` for the original


def after_batch_defaults(engine_args: Any, change: Callable[[Any, Any], None]) -> None:
    """Let a function change these arguments once vLLM has put in its batch sizes.

    `change` is given them and the model's configuration. Remove when vLLM asks, with LoRA, for
    room for what a step may have, and not for whole drafts of all requests.
    """
    name = "_set_default_max_num_seqs_and_batched_tokens_args"
    original = getattr(engine_args, name)

    def set_defaults(usage_context: Any, model_config: Any, *args: Any) -> None:
        original(usage_context, model_config, *args)
        change(engine_args, model_config)

    setattr(engine_args, name, set_defaults)


def wrap_validate_spec_decode(validate: Callable[[Any, Any], bool]) -> None:
    """Lift vLLM's refusal of `min_p` and `logit_bias` under speculation, for our methods.

    `validate`, given sampling parameters and the speculative configuration, is true where it has
    judged the parameters itself.

    What vLLM does not know of is judged here too: remove the lifting when its refusal asks the
    method (patches/0003).
    """
    from vllm.sampling_params import SamplingParams

    def validate_spec_decode(original: Any, self: Any, speculative_config: Any) -> None:
        if not validate(self, speculative_config):
            original(self, speculative_config)

    _replace(SamplingParams, "_validate_spec_decode", validate_spec_decode)


def wrap_process_inputs(read_hint: Callable[[Any, Any], None]) -> None:
    """Let requests bring hints, and read them where the tokenizer is.

    `read_hint`, given vLLM's input processor and the parameters of a request of an engine of ours,
    puts token ids in the place of texts. OpenAI's `prediction`, which vLLM takes and leaves unread,
    becomes one of the parameters.

    Remove when plugins may see a request before it is sent to the engine.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.v1.engine.input_processor import InputProcessor

    def process_inputs(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        if request.sampling_params is not None:
            read_hint(self, request.sampling_params)
        return request

    def to_sampling_params(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        params = original(self, *args, **kwargs)
        if (prediction := (self.model_extra or {}).get("prediction")) is not None:
            params.extra_args = {**(params.extra_args or {}), "prediction": prediction}
        return params

    _replace(InputProcessor, "process_inputs", process_inputs)
    _replace(ChatCompletionRequest, "to_sampling_params", to_sampling_params)


def wrap_do_tracing(attributes_of: Callable[[Any], dict[str, Any]]) -> None:
    """Let the span of a request say more.

    `attributes_of` says what, given vLLM's state of a request that has ended.

    Remove when vLLM says what was drafted and accepted (patches/0007).
    """
    from vllm.v1.engine import output_processor

    added: dict[str, Any] = {}

    def make_span(original: Any, *args: Any, attributes: dict[str, Any], **kwargs: Any) -> Any:
        return original(*args, attributes=attributes | added, **kwargs)

    def do_tracing(original: Any, self: Any, output: Any, req_state: Any, *args: Any) -> None:
        added.update(attributes_of(req_state))
        try:
            original(self, output, req_state, *args)
        finally:
            added.clear()

    _replace(output_processor, "instrument_manual", make_span)
    _replace(output_processor.OutputProcessor, "do_tracing", do_tracing)


def wrap_streams(
    detokenizer: Callable[[Any], Any], by_token: Callable[[Any, Any, Any], Any]
) -> None:
    """Let a server that parses tool calls or reasoning hand on a step's tokens one by one.

    `detokenizer` is given vLLM's detokenizer of a streaming request, and returns what takes its
    place. `by_token`, given a server, its parser or None and what a request is answered from,
    returns what it is to be answered from.

    Other servers, engines and workers are left as they are: this waits until a parser is made.
    Remove when vLLM's parsers do not depend on how a text is cut into deltas.
    """
    from vllm.parser import ParserManager

    def get_parser(original: Any, *args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        if parser is not None:
            _wrap_servers(detokenizer, by_token)
        return parser

    _replace(ParserManager, "get_parser", get_parser)


def _wrap_servers(
    detokenizer: Callable[[Any], Any], by_token: Callable[[Any, Any, Any], Any]
) -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    def from_new_request(original: Any, tokenizer: Any, request: Any) -> Any:
        made = original(tokenizer, request)
        streams = request.sampling_params.output_kind is RequestOutputKind.DELTA
        return detokenizer(made) if streams else made

    def chat(original: Any, self: Any, request: Any, results: Any, *args: Any, **kw: Any) -> Any:
        return original(self, request, by_token(self, self.parser_cls, results), *args, **kw)

    def respond(
        original: Any, self: Any, request: Any, params: Any, contexts: Any, *args: Any
    ) -> Any:
        return original(self, request, params, by_token(self, self.parser, contexts), *args)

    _replace(IncrementalDetokenizer, "from_new_request", from_new_request)
    _replace(OpenAIServingChat, "chat_completion_stream_generator", chat)
    _replace(OpenAIServingResponses, "_process_simple_streaming_events", respond)


def wrap_request_stats(stats: Any) -> None:
    """Count what requests get by `stats`, which has the functions of `request_stats`.

    vLLM counts the tokens of a step before it drops those behind a stop string: remove `trim` when
    it counts afterwards, and the rest when it has such a histogram.
    """
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    def update(original: Any, self: Any, state: Any, output: Any, *args: Any) -> None:
        original(self, state, output, *args)
        if args[-1] is not None and output.new_token_ids:
            stats.count_step(state, args[-1])

    def trim(original: Any, _: Any, state: Any, output: Any, num_prev_tokens: int) -> None:
        num_tokens = len(output.new_token_ids)
        original(state, output, num_prev_tokens)
        stats.drop_tokens(state, num_tokens - len(output.new_token_ids))

    def finish(original: Any, self: Any, state: Any, reason: Any, iteration_stats: Any) -> None:
        if iteration_stats is not None:
            stats.finish(state, iteration_stats)
        original(self, state, reason, iteration_stats)

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        stats.add_histogram(self)

    _replace(OutputProcessor, "_update_stats_from_output", update)
    _replace(OutputProcessor, "_trim_surplus_tokens", trim)  # static: no `self` for the original
    _replace(OutputProcessor, "_update_stats_from_finished", finish)
    _replace(PrometheusStatLogger, "__init__", init)


def wrap_gated_delta_net(by_depth: Callable[..., None]) -> None:
    """Let `by_depth` run gated delta nets on CPU where metadata have `depths`, which are ours.

    Remove when vLLM runs their core as a method of the layer, as it does for Mamba2.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def run(original: Any, layer: Any, metadata: Any, *tensors: Any) -> None:
        if not hasattr(metadata, "depths"):
            original(layer, metadata, *tensors)
            return
        *inputs, output = tensors
        by_depth(layer, metadata, functools.partial(original, layer), inputs, output)

    _replace(gdn_attention, "_cpu_gdn_attention_nonspec", run)


def without_experts_load(model_runner: Any) -> AbstractContextManager[None]:
    """Steps that do not count as load of experts, as vLLM's warm-up does not.

    `model_runner` is of Model Runner V2. Always vLLM's own with 0.33; remove with vLLM 0.32.
    """
    suppress = getattr(model_runner.eplb, "suppress", contextlib.nullcontext)
    return suppress()


def hide_draft_path(engine_args: Any, path: str) -> None:
    """Show vLLM the folder of a draft model under another name while it makes a configuration.

    Some words in a path change the method, whatever was asked for. The configuration has the path
    that was given. Remove when vLLM leaves the method `draft_model` as it is.
    """
    original = engine_args.create_speculative_config

    def create_speculative_config(*args: Any, **kwargs: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            link = Path(folder, "draft")
            link.symlink_to(Path(path).absolute())
            engine_args.speculative_config["model"] = str(link)
            made = original(*args, **kwargs)
        draft = made.draft_model_config
        made.model = draft.model = draft.served_model_name = path
        draft.hf_config._name_or_path = path  # by which compiled code is kept
        return made

    engine_args.create_speculative_config = create_speculative_config
