"""The entry point `vllm.general_plugins`: teaches vLLM our method names.

vLLM calls `register` in every process that makes a configuration or an engine, sometimes more than
once. Ray Serve makes configurations in one process and uses them in another, where none is made:
they bring it along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_recycle.integration.options import METHODS, has_settings
from vllm_recycle.integration.requests import shims as request_shims
from vllm_recycle.integration.start import shims, versions


def register() -> None:
    """Install our shims; where that fails, only our methods are refused.

    It never raises: it runs for all who have the package installed, whatever they use.
    """
    try:
        _install()
    except Exception as error:
        shims.refuse_methods(list(METHODS), error)


def _install() -> None:
    """Install the shims; raises RuntimeError if vLLM's version is not supported."""
    versions.check_vllm_version()
    from vllm_recycle.integration.requests import parameters
    from vllm_recycle.integration.start import environment

    shims.add_method_names(METHODS)
    shims.host_on_v2(has_settings)
    for variable in (environment.VARIABLE, versions.ALLOW_UNTESTED):
        shims.declare_variable(variable)
    shims.wrap_validate_spec_decode(parameters.validate_spec_decode)
    # The last, since with it our methods are there.
    shims.wrap_create_engine_config(_create_engine_config)


def _create_engine_config(original: Any, engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    """The configuration of an engine; of one of ours by what vLLM makes of its own methods."""
    from vllm_recycle.integration.requests.parameters import IS_OURS
    from vllm_recycle.integration.start import config, environment

    def make(engine_args: Any) -> Any:
        rewritten = config.rewrite(engine_args)
        if rewritten is None:
            return original(engine_args, *args, **kwargs)
        vllm_config = original(rewritten, *args, **kwargs)
        if has_settings(vllm_config):
            config.settle(vllm_config, getattr(rewritten, "step_tokens", None))
            traces = vllm_config.observability_config.otlp_traces_endpoint is not None
            setattr(vllm_config.speculative_config, IS_OURS, Registered(traces))
        return vllm_config

    return environment.create_config(make, engine_args)


class Registered:
    """What a configuration of ours carries: where it is unpickled, `register` was called.

    Servers then stream token by token to parsers. With `traces`, spans of requests are made, which
    then say what was drafted.
    """

    def __init__(self, traces: bool) -> None:
        from vllm_recycle.integration.requests import parameters, stats, streaming, tracing

        self.traces = traces
        request_shims.wrap_process_inputs(parameters.process_inputs)
        request_shims.wrap_request_stats(stats)
        request_shims.trim_behind_stop_strings()
        request_shims.wrap_streams(streaming)
        if traces:
            request_shims.wrap_do_tracing(tracing.span_attributes)

    def __reduce__(self) -> tuple[Callable[[bool], Registered], tuple[bool]]:
        return _arrive, (self.traces,)


def _arrive(traces: bool) -> Registered:
    _install()
    return Registered(traces)
