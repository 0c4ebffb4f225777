"""From `{"method": "token_recycling", ...}` to a configuration that vLLM accepts.

A method of vLLM hosts ours: for Token Recycling one that has no draft model and no lookahead slots,
and that the model runner of the platform knows; for Ouroboros vLLM's own `draft_model`. What our
runners need beside it travels in `additional_config`. What was not built and tested with vLLM's
other features is refused here, at start-up and by name.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_recycle.core.tree import MAX_NODES
from vllm_recycle.integration.capture_sizes import largest_capture_size
from vllm_recycle.integration.draft_limits import (
    draft_forward_rows,
    drafting_shapes,
    most_draft_rows,
)
from vllm_recycle.integration.options import (
    METHODS,
    OUROBOROS,
    TOKEN_RECYCLING,
    MethodOptions,
    OuroborosOptions,
)
from vllm_recycle.integration.options.given import TABLE, check_table, given_keys
from vllm_recycle.integration.plugin import Registered
from vllm_recycle.integration.requests import IS_OURS
from vllm_recycle.integration.saved_state import check_state_file

logger = init_logger("vllm.recycle")

ADDITIONAL_CONFIG_KEY = "vllm_recycle"
SCHEDULER = "vllm_recycle.integration.scheduler.TreeScheduler"
ASYNC_SCHEDULER = "vllm_recycle.integration.scheduler.AsyncTreeScheduler"
CHOOSES_SIZES = "chooses_sizes"


@dataclass(frozen=True, slots=True)
class Platform:
    """How our methods run on a kind of device.

    Attributes:
        worker: qualified name of our worker.
        host_methods: our methods, and vLLM's that each takes the place of.
        use_v2_model_runner: which of vLLM's model runners ours is made of.
        attention_backend: the one that ours takes the place of; None where vLLM has but one.

    """

    worker: str
    host_methods: dict[str, str]
    use_v2_model_runner: bool
    attention_backend: AttentionBackendEnum | None


PLATFORMS = {
    "cpu": Platform(
        "vllm_recycle.integration.cpu.worker.TreeCPUWorker",
        {TOKEN_RECYCLING: "custom_class", OUROBOROS: "draft_model"},
        False,
        None,
    ),
    "cuda": Platform(
        "vllm_recycle.integration.cuda.worker.TreeGPUWorker",
        {TOKEN_RECYCLING: "ngram_gpu", OUROBOROS: "draft_model"},
        True,
        AttentionBackendEnum.FLASH_ATTN,
    ),
}


def get_platform(method: str) -> Platform:
    """How a method of ours runs here.

    Raises:
        NotImplementedError: it does not.

    """
    name = "cuda" if current_platform.is_cuda() else current_platform.device_type
    if name not in PLATFORMS:
        raise NotImplementedError(
            f"{method}: got platform {current_platform.device_name!r}, expected one of "
            f"{list(PLATFORMS)}"
        )
    return PLATFORMS[name]


def rewrite(engine_args: Any) -> Any | None:
    """Engine arguments with our method in terms of vLLM's, or None where it is not asked for.

    The arguments given are left as they are.

    Raises:
        ValueError: an option of the method, or a flag that it needs for itself.
        NotImplementedError: a platform that the method does not run on.

    """
    given = given_keys(engine_args, METHODS)
    if given is None:
        return None
    method = given.pop("method")
    platform = get_platform(method)
    # Refused here, since vLLM would first ask for another flag, or we overwrite theirs.
    runner = envs.VLLM_USE_V2_MODEL_RUNNER
    early = {
        f"VLLM_USE_V2_MODEL_RUNNER={int(bool(runner))}": runner is not None
        and runner != platform.use_v2_model_runner,
        "--async-scheduling": engine_args.async_scheduling and not platform.use_v2_model_runner,
    }
    _refuse(method, early)
    table = given.pop(TABLE, None)
    options = METHODS[method].parse(given, on_gpu=platform.use_v2_model_runner)
    rewritten = copy.copy(engine_args)
    rewritten.spec_method = rewritten.spec_model = rewritten.spec_tokens = None
    needs = f"the method {method!r} brings its own"
    if engine_args.worker_cls != "auto":
        raise ValueError(f"--worker-cls: got {engine_args.worker_cls!r}, expected none: {needs}")
    if engine_args.scheduler_cls is not None:
        raise ValueError(
            f"--scheduler-cls: got {engine_args.scheduler_cls!r}, expected none: {needs}"
        )
    additional = engine_args.additional_config or {}
    if not isinstance(additional, dict):
        raise ValueError(f"--additional-config: got {type(additional)}, expected a dict: {needs}")
    rewritten.worker_cls = platform.worker
    # A table or a price of the user's wins over what is chosen step by step, which goes by the
    # worth of the drafts of all requests.
    is_measured = options.row_cost is None and (method == OUROBOROS or not options.isolates)
    chooses = is_measured and platform.use_v2_model_runner and not table
    values = {"method": method, CHOOSES_SIZES: chooses, **dataclasses.asdict(options)}
    rewritten.additional_config = {**additional, ADDITIONAL_CONFIG_KEY: values}
    if not platform.use_v2_model_runner:
        rewritten.async_scheduling = False
    default_schedule = options.schedule(
        on_gpu=platform.use_v2_model_runner,
        max_num_batched_tokens=engine_args.max_num_batched_tokens,
    )
    rewritten.speculative_config = {
        "method": platform.host_methods[method],
        **options.host_config(),
        "num_speculative_tokens": options.num_nodes,
        TABLE: check_table(table, options.num_nodes) or default_schedule,
    }
    if platform.use_v2_model_runner:
        largest = largest_capture_size(engine_args, options.num_nodes)
        rewritten.max_cudagraph_capture_size = largest
    if platform.attention_backend is not None:
        _choose_attention_backend(rewritten, platform.attention_backend, needs)
    return rewritten


def _choose_attention_backend(engine_args: Any, ours: AttentionBackendEnum, needs: str) -> None:
    given = engine_args.attention_backend or engine_args.attention_config.backend
    if isinstance(given, str):
        given = AttentionBackendEnum[given.upper()]
    if given not in (None, ours):
        raise NotImplementedError(
            f"--attention-backend: got {given.name}, expected none or {ours.name}: "
            f"{needs} for the trees, which is made of {ours.name}"
        )
    engine_args.attention_backend = None
    engine_args.attention_config = copy.copy(engine_args.attention_config)
    engine_args.attention_config.backend = ours


def get_options(vllm_config: Any) -> MethodOptions:
    """The options that `rewrite` put into the configuration."""
    values = dict(vllm_config.additional_config[ADDITIONAL_CONFIG_KEY])
    del values[CHOOSES_SIZES]
    return METHODS[values.pop("method")](**values)


def finish(vllm_config: Any) -> None:
    """Complete the configuration that vLLM made, and refuse what the method was not built with.

    Raises:
        NotImplementedError: naming the flag to change.
        ValueError: a tree that is deeper than the context, a budget that has no draft, a state file
            of another model.

    """
    options = get_options(vllm_config)
    platform = get_platform(options.method)
    traces = vllm_config.observability_config.otlp_traces_endpoint is not None
    setattr(vllm_config.speculative_config, IS_OURS, Registered(traces))
    reasoning = vllm_config.reasoning_config
    if reasoning and not (reasoning.reasoning_start_str or reasoning.reasoning_end_str):
        # From --reasoning-parser alone, for thinking budgets, which requests are refused with.
        vllm_config.reasoning_config = None
    scheduler = vllm_config.scheduler_config
    # Known only now: vLLM chooses whether to schedule ahead.
    scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    if platform.use_v2_model_runner:
        logger.warning_once(
            "%s on CUDA is tested in Triton's interpreter, and has not run on a GPU yet",
            options.method,
        )
        _warn_of_missing_graphs(vllm_config)
    max_model_len = vllm_config.model_config.max_model_len
    if not options.is_dynamic:
        tree = options.load_tree()
        if tree.depth >= max_model_len:
            raise ValueError(
                f"tree {tree.name!r}: depth {tree.depth}, expected less than "
                f"--max-model-len {max_model_len}"
            )
    if int(options.budget_share * scheduler.max_num_batched_tokens) < 1:
        raise ValueError(
            f"speculative_config: budget_share is {options.budget_share}, expected a token or more "
            f"of --max-num-batched-tokens {scheduler.max_num_batched_tokens} for drafts"
        )
    if isinstance(options, OuroborosOptions):
        _check_draft_model(vllm_config, options, platform)
    _refuse(options.method, _unsupported(vllm_config, platform))
    check_state_file(options, vllm_config)


def _unsupported(vllm_config: Any, platform: Platform) -> dict[str, bool]:
    """What the methods were not built or tested with, and whether the engine has it."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    runner = "V2" if vllm_config.use_v2_model_runner else "V1"
    return {
        "--pipeline-parallel-size above 1": parallel.pipeline_parallel_size > 1,
        "--decode-context-parallel-size above 1": parallel.decode_context_parallel_size > 1,
        "--prefill-context-parallel-size above 1": parallel.prefill_context_parallel_size > 1,
        "--data-parallel-size above 1 with a mixture-of-experts model": (
            parallel.data_parallel_size > 1 and model.is_moe
        ),
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "--enable-dbo": parallel.enable_dbo,
        "--enable-batch-sharded-sampling": bool(parallel.enable_batch_sharded_sampling),
        "--kv-transfer-config": vllm_config.kv_transfer_config is not None,
        "--kv-offloading-size": cache.kv_offloading_size is not None,
        "--kv-sharing-fast-prefill": cache.kv_sharing_fast_prefill,
        "--enable-return-routed-experts": vllm_config.aux_output_config.enabled,
        "--ec-transfer-config": vllm_config.ec_transfer_config is not None,
        f"--kv-cache-dtype {cache.cache_dtype}": cache.cache_dtype != "auto",
        "--watermark-config": vllm_config.watermark_config is not None,
        "--diffusion-config": vllm_config.diffusion_config is not None,
        "--reasoning-config": vllm_config.reasoning_config is not None,
        "--logits-processors": bool(model.logits_processors),
        "an installed plugin of vllm.logits_processors": bool(
            entry_points(group="vllm.logits_processors")
        ),
        # vLLM would start, and then refuse each request that it is for.
        "--structured-outputs-config.backend lm-format-enforcer": (
            vllm_config.structured_outputs_config.backend == "lm-format-enforcer"
        ),
        "--enable-sleep-mode": model.enable_sleep_mode,
        "VLLM_BATCH_INVARIANT=1": envs.VLLM_BATCH_INVARIANT,
        "--enable-prompt-embeds": model.enable_prompt_embeds,
        "--return-sampling-mask": model.return_sampling_mask,
        "--enable-trace-replay": model.enable_trace_replay,
        f"--runner {model.runner_type}": model.runner_type != "generate",
        "a multimodal model without --language-model-only": model.supports_multimodal_inputs,
        "a model with M-RoPE on a GPU": model.uses_mrope and platform.use_v2_model_runner,
        **_features_of("model", model),
        # Last: others of these lead to it.
        f"Model Runner {runner}, which this configuration leads to": platform.use_v2_model_runner
        != vllm_config.use_v2_model_runner,
    }


def _features_of(name: str, model: Any) -> dict[str, bool]:
    """What a model has that the trees were not built for."""
    return {
        f"a {name} with reference sliding-window attention": model.rswa_window is not None,
        f"a {name} with ALiBi": model.uses_alibi,
        f"a {name} with MLA": model.use_mla,
        f"a hybrid or Mamba {name}": model.is_hybrid or model.is_attention_free,
        f"an encoder-decoder {name}": model.is_encoder_decoder,
    }


def _check_draft_model(vllm_config: Any, options: OuroborosOptions, platform: Platform) -> None:
    scheduler, spec = vllm_config.scheduler_config, vllm_config.speculative_config
    draft = spec.draft_model_config
    features = {
        **_features_of("draft model", draft),
        "a multimodal draft model": draft.is_multimodal_model,
        "a draft model with M-RoPE": draft.uses_mrope,
    }
    _refuse(OUROBOROS, features)
    max_model_len = vllm_config.model_config.max_model_len
    if draft.max_model_len < max_model_len:
        raise ValueError(
            f"--max-model-len: got {max_model_len}, expected at most the "
            f"{draft.max_model_len} tokens of the draft model {options.model}"
        )
    shape = options.shape()
    rows = shape.lookahead().num_nodes + options.phrase_length
    if platform.use_v2_model_runner:
        one, table = draft_forward_rows(shape), spec.num_speculative_tokens_per_batch_size
        if one > 1 + MAX_NODES:
            raise ValueError(
                f"speculative_config: a draft forward has {one} rows of a request, expected at "
                f"most {1 + MAX_NODES}: choose a smaller window or fewer guesses"
            )
        shapes = drafting_shapes(
            shape,
            table,
            max_num_reqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )
        rows = most_draft_rows(shapes)
        given, target = options.draft_tensor_parallel_size, vllm_config.parallel_config
        if given not in (None, target.tensor_parallel_size):
            raise NotImplementedError(
                f"draft_tensor_parallel_size: got {given}, expected none or that of the target, "
                f"{target.tensor_parallel_size}"
            )
    if scheduler.max_num_batched_tokens < rows:
        raise ValueError(
            f"--max-num-batched-tokens: got {scheduler.max_num_batched_tokens}, expected at "
            f"least the {rows} rows of a draft forward, or a smaller window or fewer guesses"
        )


def _warn_of_missing_graphs(vllm_config: Any) -> None:
    """A table of the user's may lead to batches that vLLM captures no graph for."""
    most = vllm_config.compilation_config.max_cudagraph_capture_size
    if not most:
        return
    table = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
    last_of_all = vllm_config.scheduler_config.max_num_seqs
    for first, last, num_nodes in table:
        rows = min(last, last_of_all) * (num_nodes + 1)
        if num_nodes and first <= last_of_all and rows > most:
            logger.warning(
                "num_speculative_tokens_per_batch_size: %d requests with %d nodes are %d rows, "
                "more than --max-cudagraph-capture-size %d: such steps run without a full graph",
                min(last, last_of_all), num_nodes, rows, most,
            )  # fmt: skip


def _refuse(method: str, features: dict[str, bool]) -> None:
    for feature, present in features.items():
        if present:
            raise NotImplementedError(
                f"{method} does not support {feature}; change it, or leave out --speculative-config"
            )
