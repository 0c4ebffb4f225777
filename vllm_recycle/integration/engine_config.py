"""From `{"method": "token_recycling", ...}` to a configuration that vLLM accepts.

vLLM's own method `custom_class` hosts ours: it has no draft model and no lookahead slots. Model
Runner V2 has no such method, so there `ngram_gpu` does. What our runners need beside it travels in
`additional_config`. What was not built and tested with vLLM's other features is refused here, at
start-up and by name.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from importlib.metadata import entry_points
from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform

from vllm_recycle.integration.options import METHODS, TOKEN_RECYCLING, TokenRecyclingOptions

ADDITIONAL_CONFIG_KEY = "vllm_recycle"
DRAFTER = "vllm_recycle.integration.drafter.TreeDrafter"
CPU_WORKER = "vllm_recycle.integration.worker.TreeCPUWorker"
SCHEDULER = "vllm_recycle.integration.scheduler.TreeScheduler"
OPT_OUT = "speculate"
# For the tests of `v2_runner` alone, which says what is missing there.
ALLOW_V2 = "VLLM_RECYCLE_ALLOW_V2"


def rewrite(engine_args: Any) -> Any | None:
    """Engine arguments with our method in terms of vLLM's, or None where it is not asked for.

    The arguments given are left as they are.

    Raises:
        ValueError: an option of the method, or a flag that it needs for itself.
        NotImplementedError: a platform that the method does not run on.

    """
    given = dict(engine_args.speculative_config or {})
    given = {key.replace("-", "_"): value for key, value in given.items()}
    flags = {"method": "spec_method", "model": "spec_model"}
    flags["num_speculative_tokens"] = "spec_tokens"
    for key, flag in flags.items():
        value = getattr(engine_args, flag)
        if value is not None:
            given.setdefault(key, value)
    if given.pop("method", None) not in METHODS:
        return None
    if not current_platform.is_cpu():
        raise NotImplementedError(
            f"{TOKEN_RECYCLING}: got platform {current_platform.device_name!r}, expected 'cpu'"
        )
    # Refused here, since vLLM would first ask for another flag, or we overwrite theirs.
    early = {
        "--enable-lora": engine_args.enable_lora,
        "--async-scheduling": engine_args.async_scheduling,
        "VLLM_USE_V2_MODEL_RUNNER=1": envs.VLLM_USE_V2_MODEL_RUNNER
        and os.environ.get(ALLOW_V2) != "1",
    }
    _refuse(early)
    options = TokenRecyclingOptions.parse(given)
    tree = options.load_tree()
    rewritten = copy.copy(engine_args)
    rewritten.spec_method = rewritten.spec_model = rewritten.spec_tokens = None
    if engine_args.worker_cls != "auto":
        raise ValueError(f"--worker-cls: got {engine_args.worker_cls!r}, expected none: {_NEEDS}")
    if engine_args.scheduler_cls is not None:
        raise ValueError(
            f"--scheduler-cls: got {engine_args.scheduler_cls!r}, expected none: {_NEEDS}"
        )
    additional = engine_args.additional_config or {}
    if not isinstance(additional, dict):
        raise ValueError(f"--additional-config: got {type(additional)}, expected a dict: {_NEEDS}")
    rewritten.worker_cls = CPU_WORKER
    rewritten.scheduler_cls = SCHEDULER
    rewritten.async_scheduling = False
    rewritten.additional_config = {
        **additional,
        ADDITIONAL_CONFIG_KEY: dataclasses.asdict(options),
    }
    rewritten.speculative_config = {
        "method": "custom_class",
        "model": DRAFTER,
        "num_speculative_tokens": tree.num_nodes,
        # One size for every batch. Said explicitly, since vLLM otherwise pads a request that
        # just came in to a full draft of -1, and keeps it waiting where that does not fit.
        "num_speculative_tokens_per_batch_size": [(1, 1 << 20, tree.num_nodes)],
    }
    if envs.VLLM_USE_V2_MODEL_RUNNER:
        # Without the table: V2's graphs want the padding, and its runner knows placeholders.
        rewritten.speculative_config["method"] = "ngram_gpu"
        del rewritten.speculative_config["num_speculative_tokens_per_batch_size"]
    return rewritten


_NEEDS = f"the method {TOKEN_RECYCLING!r} brings its own"


def is_ours(speculative_config: Any) -> bool:
    """Whether an engine's speculative configuration is one that `rewrite` made."""
    return speculative_config is not None and speculative_config.model == DRAFTER


def get_options(vllm_config: Any) -> TokenRecyclingOptions:
    """The options that `rewrite` put into the configuration."""
    return TokenRecyclingOptions(**vllm_config.additional_config[ADDITIONAL_CONFIG_KEY])


def check_supported(vllm_config: Any) -> None:
    """Refuse what the method was not built and tested with.

    Raises:
        NotImplementedError: naming the flag to change.
        ValueError: a tree that is deeper than the context.

    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    tree = get_options(vllm_config).load_tree()
    if tree.depth >= model.max_model_len:
        raise ValueError(
            f"tree {tree.name!r}: depth {tree.depth}, expected less than "
            f"--max-model-len {model.max_model_len}"
        )
    refused = {
        "--pipeline-parallel-size above 1": parallel.pipeline_parallel_size > 1,
        "--decode-context-parallel-size above 1": parallel.decode_context_parallel_size > 1,
        "--prefill-context-parallel-size above 1": parallel.prefill_context_parallel_size > 1,
        "--data-parallel-size above 1": parallel.data_parallel_size > 1,
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "--enable-dbo": parallel.enable_dbo,
        "--enable-batch-sharded-sampling": bool(parallel.enable_batch_sharded_sampling),
        "--kv-transfer-config": vllm_config.kv_transfer_config is not None,
        "--kv-offloading-size": cache.kv_offloading_size is not None,
        "--kv-sharing-fast-prefill": cache.kv_sharing_fast_prefill,
        "--ec-transfer-config": vllm_config.ec_transfer_config is not None,
        f"--kv-cache-dtype {cache.cache_dtype}": cache.cache_dtype != "auto",
        "--watermark-config": vllm_config.watermark_config is not None,
        "--diffusion-config": vllm_config.diffusion_config is not None,
        "--reasoning-config": vllm_config.reasoning_config is not None,
        "--logits-processors": bool(model.logits_processors),
        "an installed plugin of vllm.logits_processors": bool(
            entry_points(group="vllm.logits_processors")
        ),
        "--enable-prompt-embeds": model.enable_prompt_embeds,
        "--return-sampling-mask": model.return_sampling_mask,
        "--enable-trace-replay": model.enable_trace_replay,
        f"--runner {model.runner_type}": model.runner_type != "generate",
        "a model with sliding-window attention": model.get_sliding_window() is not None,
        "a model with ALiBi": model.uses_alibi,
        "a model with M-RoPE": model.uses_mrope,
        "a model with MLA": model.use_mla,
        "a hybrid or Mamba model": model.is_hybrid or model.is_attention_free,
        "an encoder-decoder model": model.is_encoder_decoder,
        "a multimodal model": model.is_multimodal_model,
    }
    _refuse(refused)


def _refuse(features: dict[str, bool]) -> None:
    for feature, present in features.items():
        if present:
            raise NotImplementedError(
                f"{TOKEN_RECYCLING} does not support {feature}; change it, or leave out "
                "--speculative-config"
            )


def validate_sampling_params(params: Any, speculative_config: Any) -> bool:
    """Judge a request's parameters where the engine runs our method; see `versions`.

    Every sampling parameter is exact under the tree walk, `min_p` and `logit_bias` included.

    Raises:
        VLLMValidationError: an opt-out that is neither true nor false.

    """
    if not is_ours(speculative_config):
        return False
    speculate = (params.extra_args or {}).get(OPT_OUT, True)
    if speculate not in (True, False):  # 0 and 1 too: vLLM's server makes these of false and true
        raise VLLMValidationError(
            f"extra_args: {OPT_OUT!r} is {speculate!r}, expected true or false",
            parameter="extra_args",
            value=speculate,
        )
    return True
