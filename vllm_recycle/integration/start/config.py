"""From `{"method": "token_recycling", ...}` to a configuration that vLLM accepts.

`rewrite` names a method of vLLM that hosts ours: that of the trunk, such as `draft_model` for
Ouroboros, or else one that has no draft model and no lookahead slots, and that the model runner of
the platform knows. `settle` decides what needs the configuration that vLLM makes of it. The
settings of an engine travel in `additional_config` (`options`). `refusals` says what our methods
do not support.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from pydantic import ValidationError
from vllm import __version__ as vllm_version
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_recycle.core.tree import MAX_CHAIN
from vllm_recycle.integration.options import (
    METHODS,
    MethodOptions,
    Settings,
    options_class,
    settings_of,
)
from vllm_recycle.integration.options.base import DRAFT_MODEL, HOSTED_TRUNK, TABLE
from vllm_recycle.integration.options.given import check_table, given_keys
from vllm_recycle.integration.options.limits import UNLIMITED
from vllm_recycle.integration.start import refusals, shims
from vllm_recycle.integration.start.platform import Platform, get_platform
from vllm_recycle.integration.start.versions import SUPPORTED_VLLM
from vllm_recycle.integration.state.saved_state import check_state_file

logger = init_logger("vllm.recycle")

SCHEDULER = "vllm_recycle.integration.schedule.scheduler.TreeScheduler"
ASYNC_SCHEDULER = "vllm_recycle.integration.schedule.scheduler.AsyncTreeScheduler"
# A draft model with one of these anywhere in its path is of another method for vLLM.
WORDS_OF_METHODS = ("eagle-", "eagle3", "dflash", "dspark")

# Nodes of a chain where each keeps a copy of all states of its request, in blocks of the KV cache.
MOST_STATES = 4
# Of a chain where it can not follow the load.
NODES_AT_ANY_LOAD = 4

# The largest token count that vLLM captures a CUDA graph for, on a Blackwell GPU and on others; it
# captures multiples of the stride.
BLACKWELL, LARGEST_ON_BLACKWELL, LARGEST, STRIDE = 100, 1024, 512, 16


class OptionError(ValueError):
    """A key or a value of a speculative configuration that goes with no engine."""


def rewrite(engine_args: Any) -> Any | None:
    """A copy of engine arguments with our method in terms of vLLM's, None where it is not ours.

    Raises:
        OptionError: a key of the method, or its value.
        ValueError: a flag that the method needs for itself.
        NotImplementedError: a platform that the method does not run on.
    """
    try:
        user_config = given_keys(engine_args, METHODS)
        if user_config is None:
            return None
        platform = get_platform(user_config["method"])
        keys = {key: value for key, value in user_config.items() if key != TABLE}
        options = options_class(keys).parse(keys, on_gpu=platform.on_v2)
        user_table = check_table(user_config.get(TABLE), options.num_nodes)
        table = user_table or options.schedule(
            on_gpu=platform.on_v2, max_num_batched_tokens=engine_args.max_num_batched_tokens
        )
    except ValueError as error:
        raise OptionError(str(error)) from None
    method = options.method
    _refuse_flags(engine_args, options, platform)
    rewritten = copy.copy(engine_args)
    rewritten.spec_method = rewritten.spec_model = rewritten.spec_tokens = None
    if not platform.has_kernels():  # a warning says so
        if engine_args.nnodes > 1:
            raise RuntimeError(f"{method}: no C++ kernels on this node: install the package g++")
        rewritten.speculative_config = None
        return rewritten
    rewritten.worker_cls = platform.worker
    # A table or a price of the user's wins over what is chosen step by step, which goes by the
    # worth of the drafts of all requests. Ranks of an external launcher have schedulers of their
    # own, which must agree, and clocks, which do not.
    is_measured = options.row_cost is None and not options.isolates
    is_measured &= options.has_trees  # chains have vLLM's graphs, of the sizes of its table
    launcher = engine_args.distributed_executor_backend == "external_launcher"
    is_measured &= not (launcher and engine_args.tensor_parallel_size > 1)
    chooses_sizes = is_measured and platform.on_v2 and not user_table
    settings = Settings(options=options, chooses_sizes=chooses_sizes, table=table)
    rewritten.additional_config = settings.put(engine_args.additional_config or {})
    rewritten.speculative_config = options.host_config(platform.host)
    if not platform.on_v2:
        rewritten.async_scheduling = False
    else:
        rewritten.speculative_config[TABLE] = table  # vLLM's V1 runner would take it away
    if platform.on_v2 and options.has_trees:
        rewritten.max_cudagraph_capture_size = _largest_capture_size(engine_args, options.num_nodes)
    if rewritten.enable_lora:
        shims.after_batch_defaults(rewritten, _make_room_with_lora)
    shims.wrap_create_speculative_config(rewritten, partial(_create_host, method))
    return rewritten


def _refuse_flags(engine_args: Any, options: MethodOptions, platform: Platform) -> None:
    """Refuse flags for which vLLM would first ask for another one, or which we overwrite.

    So are a worker or a scheduler of the user's, a place for options that is none, and a draft
    model whose name makes it one of another method for vLLM.
    """
    runner = envs.VLLM_USE_V2_MODEL_RUNNER
    flags = {
        f"VLLM_USE_V2_MODEL_RUNNER={int(bool(runner))}": runner is not None
        and runner != platform.on_v2,
        "--async-scheduling": engine_args.async_scheduling and not platform.on_v2,
        **refusals.before_a_version(options, on_v2=platform.on_v2),
    }
    refusals.refuse(options.method, flags)
    model = options.host_config(platform.host).get("model", "") if options.has_own_model else ""
    for word in WORDS_OF_METHODS:
        if word in model.lower():
            raise ValueError(
                f"speculative_config: model is {model!r}, which vLLM takes for one of its method "
                f"{word.strip('-')!r} by its name, expected a path without {word!r}: rename it or "
                "link to it"
            )
    needs = "the method brings its own"
    worker, scheduler = engine_args.worker_cls, engine_args.scheduler_cls
    for flag, value, default in (("worker", worker, "auto"), ("scheduler", scheduler, None)):
        if value != default:
            raise ValueError(f"--{flag}-cls: got {value!r}, expected none: {needs}")
    additional = engine_args.additional_config or {}
    if not isinstance(additional, dict):
        raise ValueError(f"--additional-config: got {type(additional)}, expected a dict: {needs}")


def _create_host(
    method: str, create: Any, target_model_config: Any, target_parallel_config: Any
) -> Any:
    """The speculative configuration of the host, by vLLM's function `create`.

    Raises:
        NotImplementedError: a model that is for pooling.
        ValueError: in one line what vLLM says of a key.
    """
    runner = target_model_config.runner_type
    refusals.refuse(method, {f"--runner {runner}": runner != "generate"})
    try:
        return create(target_model_config, target_parallel_config)
    except ValidationError as error:
        raise ValueError(f"speculative_config: {refusals.one_line(error)}") from None


def _make_room_with_lora(engine_args: Any, model_config: Any) -> None:
    """Raise the tokens of a step to what vLLM asks for with LoRA, until `settle`.

    It asks for whole drafts of all requests, though no step has more rows than it schedules.
    """
    tokens, requests = engine_args.max_num_batched_tokens, engine_args.max_num_seqs
    rows = requests * (1 + engine_args.speculative_config["num_speculative_tokens"])
    # Of what vLLM refuses without drafts too nothing is changed.
    min_tokens = 1 if engine_args.enable_chunked_prefill else model_config.max_model_len
    if max(requests, min_tokens) <= tokens < rows:
        engine_args.max_num_scheduled_tokens = engine_args.max_num_scheduled_tokens or tokens
        engine_args.max_num_batched_tokens, engine_args.step_tokens = rows, tokens


def _largest_capture_size(engine_args: Any, num_nodes: int) -> int | None:
    """Tokens of the largest CUDA graph, as vLLM chooses it; the user's where there is one.

    Told so, vLLM adds no sizes for uniform batches of trees, for each of which it would capture
    piecewise graphs and those of plain decoding too; `cuda.graphs` chooses graphs in another way.
    """
    names = ("max_cudagraph_capture_size", "cudagraph_capture_sizes")
    owners = (engine_args, engine_args.compilation_config)
    if any(getattr(owner, name) for owner in owners for name in names):
        return engine_args.max_cudagraph_capture_size
    is_blackwell = current_platform.is_device_capability_family(BLACKWELL)
    largest = LARGEST_ON_BLACKWELL if is_blackwell else LARGEST
    if engine_args.max_num_seqs is not None:
        largest = min(largest, 2 * engine_args.max_num_seqs * (num_nodes + 1))
    return -(-largest // STRIDE) * STRIDE


def settle(vllm_config: Any, step_tokens: int | None = None) -> None:
    """Complete the configuration that vLLM made, and refuse what the method was not built with.

    Args:
        vllm_config: vLLM's.
        step_tokens: of the user or by default, where `_make_room_with_lora` has raised them.

    Raises:
        NotImplementedError: naming the flag to change.
        ValueError: sizes that do not fit together, a state file of another model.
    """
    settings, spec = settings_of(vllm_config), vllm_config.speculative_config
    platform = get_platform(settings.options.method)
    if step_tokens is not None:
        _take_back_room(vllm_config, step_tokens)
    if settings.options.has_own_model and spec.method != DRAFT_MODEL:
        raise ValueError(
            f"speculative_config: model is {spec.model!r}, which vLLM takes for one of its method "
            f"{spec.method!r}, expected an ordinary language model"
        )
    if settings.options.trunk is None and spec.method != platform.host["method"]:
        checkpoint = f"a checkpoint that brings vLLM's method {spec.method!r}"
        refusals.refuse(settings.options.method, {checkpoint: True})
    reasons = {}  # against trees
    if settings.options.has_trees:
        reasons = refusals.unsupported_by_trees(vllm_config, platform)
    reason = next((feature for feature, present in reasons.items() if present), None)
    settings = _with_chains(vllm_config, settings, platform, reason)
    options = settings.options
    spec.num_speculative_tokens = options.num_nodes
    # vLLM takes the table away under data parallelism, lest ranks that keep step come apart.
    setattr(spec, TABLE, settings.table)
    vllm_config.additional_config = settings.put(vllm_config.additional_config)
    refusals.check(vllm_config, settings, platform, reasons if options.has_trees else {})
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    # Known only now: vLLM chooses whether to schedule ahead.
    scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    if options.trunk is not None and model.enable_sleep_mode:
        # At level 2 nobody would load the draft model's weights again.
        model.sleep_preserve_parameter_names += ["draft.*"]
    if spec.method == "medusa":  # has a head for each token; vLLM has counted those of a draft
        spec.draft_model_config.hf_config.num_lookahead_tokens = options.trunk_length
    if options.has_trees and platform.attention_backend is not None:
        vllm_config.attention_config.backend = platform.attention_backend
    if platform.on_v2:
        logger.warning_once(
            f"{options.method} on CUDA is tested in Triton's interpreter with vllm "
            f"{SUPPORTED_VLLM}, and hardly on a GPU; this is vllm {vllm_version}"
        )
        _warn_of_missing_graphs(vllm_config, settings)
    if warning := refusals.other_token_ids(vllm_config):
        logger.warning(warning)
    check_state_file(options, vllm_config)


def _take_back_room(vllm_config: Any, step_tokens: int) -> None:
    """Lower the tokens of a step: vLLM measures its memory by a forward of as many."""
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    if step_tokens < (compilation.max_cudagraph_capture_size or 0):
        return  # vLLM has chosen graphs of more
    for name in ("max_num_batched_tokens", "max_num_encoder_input_tokens", "encoder_cache_size"):
        setattr(scheduler, name, min(step_tokens, getattr(scheduler, name)))
    ends = compilation.compile_ranges_endpoints or ()
    compilation.compile_ranges_endpoints = sorted({min(step_tokens, end) for end in ends})


def _with_chains(
    vllm_config: Any, settings: Settings, platform: Platform, reason: str | None
) -> Settings:
    """The settings; with chains in place of grown trees where there is a reason against trees.

    Chains have one length where all drafts of all ranks must have it, as vLLM has them.
    """
    options, model, longest = settings.options, vllm_config.model_config, MAX_CHAIN
    may_be_chains = options.is_dynamic and not options.has_own_model  # else it is refused
    if options.has_trees and (reason is None or not may_be_chains):
        return settings
    if reason is not None:
        if platform.on_v2 and options.source == HOSTED_TRUNK:
            refusals.refuse(options.method, {f"a trunk on a GPU with {reason}": True})
        logger.info("%s drafts chains: trees do not go with %s", options.method, reason)
        longest = MOST_STATES if refusals.has_states(model) else model.max_model_len - 1
    # Why drafts must have one length in each step and on each rank; None where they need not. For
    # Mamba2 vLLM captures no graph of another length, and would end at the first one.
    alike = refusals.LOCKSTEP if refusals.keeps_step(vllm_config) else None
    if platform.on_v2 and refusals.has_states(model):
        alike = alike or "recurrent layers on a GPU"
    options = options.as_chains(longest, default=NODES_AT_ANY_LOAD if alike else MAX_CHAIN)
    nodes, table = options.num_nodes, settings.table
    table = [(start, end, min(entry, nodes)) for start, end, entry in table]
    if alike:
        logger.info("%s drafts %d tokens at any load: %s", options.method, nodes, alike)
        table = [(1, UNLIMITED, nodes)]
    return Settings(options=options, chooses_sizes=False, table=table)


def _warn_of_missing_graphs(vllm_config: Any, settings: Settings) -> None:
    """A table of the user's may lead to batches that vLLM captures no graph for."""
    max_rows = vllm_config.compilation_config.max_cudagraph_capture_size
    if not max_rows:
        return
    max_num_reqs = vllm_config.scheduler_config.max_num_seqs
    for range_start, range_end, num_nodes in settings.table:
        rows = min(range_end, max_num_reqs) * (num_nodes + 1)
        if num_nodes and range_start <= max_num_reqs and rows > max_rows:
            logger.warning(
                "num_speculative_tokens_per_batch_size: %d requests with %d nodes are %d rows, "
                "more than --max-cudagraph-capture-size %d: such steps run without a full graph",
                min(range_end, max_num_reqs), num_nodes, rows, max_rows,
            )  # fmt: skip
