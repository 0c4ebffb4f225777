"""Functions of vLLM that are replaced for the whole process, here and in `requests.shims` alone.

Some functions of one `EngineArgs` object are replaced here too. Other files do so with objects of
an engine of ours; ARCHITECTURE.md names them. Everything else is a subclass behind one of vLLM's
own extension points (`worker_cls`, `scheduler_cls`, the backend registry, `custom_class`
proposers). A shim for the process is idempotent, changes nothing that engines without our methods
compute, and says when it can go.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import vllm
from vllm import envs

from vllm_recycle.integration.start.versions import FEATURES

# Not vLLM's `init_logger`: this module works with any vLLM.
logger = logging.getLogger("vllm.recycle")

_SHIM = "_vllm_recycle_shim"


def replace_function(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
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

        replace_function(EngineArgs, "create_engine_config", create_engine_config)


def declare_variable(name: str) -> None:
    """Let vLLM know an environment variable, if it is set: it warns of unknown ones.

    Compiled graphs of engines with and without it are kept apart. Remove when vLLM has names for
    plugins.
    """
    if name in os.environ:
        envs.environment_variables.setdefault(name, lambda: os.environ.get(name))


def wrap_create_engine_config(create_engine_config: Callable[..., Any]) -> None:
    """Let `EngineArgs` accept our method names in `speculative_config`.

    `create_engine_config` is given vLLM's function first, and the engine arguments.

    Remove when vLLM has a registry of speculative methods.
    """
    from vllm.engine.arg_utils import EngineArgs

    replace_function(EngineArgs, "create_engine_config", create_engine_config)


def host_on_v2(is_ours: Callable[[Any], bool]) -> None:
    """Let Model Runner V2 take the host of Token Recycling in configurations of ours.

    Remove when vLLM 0.31 is dropped.
    """
    from vllm.config import VllmConfig

    def unsupported(original: Any, self: Any) -> list[str]:
        host = "speculative method 'ngram_gpu'"
        return [feature for feature in original(self) if feature != host or not is_ours(self)]

    if not FEATURES.v2_hosts:
        replace_function(VllmConfig, "_get_v2_model_runner_unsupported_features", unsupported)


def without_speculator() -> None:
    """Let Model Runner V2 start without a speculator for a host that it has none for.

    Ours takes its place. Remove when vLLM 0.31 is dropped.
    """
    from vllm.v1.worker.gpu import model_runner as v2

    def init_speculator(original: Any, vllm_config: Any, *args: Any) -> Any:
        is_host = vllm_config.speculative_config.method == "ngram_gpu"
        return None if is_host else original(vllm_config, *args)

    if not FEATURES.v2_hosts:
        replace_function(v2, "init_speculator", init_speculator)


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

    replace_function(EngineArgs, "add_cli_args", add_cli_args)  # static: no `self` for the original


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


def wrap_validate_spec_decode(validate_spec_decode: Callable[..., None]) -> None:
    """Lift vLLM's refusal of `min_p` and `logit_bias` under speculation, for our methods.

    `validate_spec_decode` is given vLLM's function first, sampling parameters, and the speculative
    configuration.

    What vLLM does not know of is judged here too: remove the lifting when its refusal asks the
    method (patches/0003).
    """
    from vllm.sampling_params import SamplingParams

    replace_function(SamplingParams, "_validate_spec_decode", validate_spec_decode)


def wrap_gated_delta_net(run_by_depth: Callable[..., None]) -> None:
    """Let `run_by_depth` run gated delta nets on CPU where metadata have `depths`, which are ours.

    Remove when vLLM runs their core as a method of the layer, as it does for Mamba2.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def run(original: Any, layer: Any, metadata: Any, *tensors: Any) -> None:
        if not hasattr(metadata, "depths"):
            original(layer, metadata, *tensors)
            return
        *inputs, output = tensors
        run_by_depth(layer, metadata, functools.partial(original, layer), inputs, output)

    replace_function(gdn_attention, "_cpu_gdn_attention_nonspec", run)


def without_experts_load(model_runner: Any) -> AbstractContextManager[None]:
    """Steps that do not count as load of experts, as vLLM's warm-up does not.

    `model_runner` is of Model Runner V2. Always vLLM's own with 0.33; remove with vLLM 0.32.
    """
    suppress = getattr(model_runner.eplb, "suppress", contextlib.nullcontext)
    return suppress()


def wrap_create_speculative_config(engine_args: Any, create: Callable[..., Any]) -> None:
    """Let `create`, which is given vLLM's function first, make the host's part of a configuration.

    Remove when vLLM asks a method which models it goes with, and its errors have one line.
    """
    original = engine_args.create_speculative_config
    engine_args.create_speculative_config = functools.partial(create, original)
