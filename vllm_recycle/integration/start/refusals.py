"""What our methods were not built and tested with, refused at start-up and by name.

What only trees do not go with is no reason to refuse: chains go wherever vLLM itself speculates.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError
from vllm import envs
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config, get_tokenizer

from vllm_recycle.core.state_file import shorten
from vllm_recycle.integration.options import MethodOptions, Settings
from vllm_recycle.integration.options.base import DRAFT_MODEL, HOSTED_TRUNK, expect
from vllm_recycle.integration.start.platform import Platform
from vllm_recycle.integration.start.versions import FEATURES, takes_images

logger = init_logger("vllm.recycle")
# Model types that have attention sinks.
WITH_SINKS = ("gpt_oss", "openai_privacy_filter")
# Those that have them if their layers are of several types, unless their configuration says.
GRANITE = ("granite", "granitemoe", "granitemoeshared")
# Keys by which configurations of other types say that they have them.
SAY_SINKS = ("swa_attention_sink_enabled", "add_swa_attention_sink_bias")

LOCKSTEP = "--data-parallel-size above 1 with a mixture-of-experts model"


def keeps_step(vllm_config: Any) -> bool:
    """Whether data-parallel ranks run each forward together, as those of experts do."""
    return vllm_config.parallel_config.data_parallel_size > 1 and vllm_config.model_config.is_moe


def refuse(method: str, features: dict[str, bool]) -> None:
    """Raise NotImplementedError for the first of these features that is there."""
    for feature, present in features.items():
        if present:
            raise NotImplementedError(
                f"{method} does not support {feature}; leave out one of the two"
            )


def one_line(error: Exception) -> str:
    """The first line of an error; for pydantic's, which field is wrong and why."""
    text = str(error)
    if isinstance(error, ValidationError):
        details = error.errors()[0]
        text = details["msg"].removeprefix("Value error, ")
        if place := ".".join(map(str, details["loc"])):
            text = f"{place} is {shorten(details['input'])}: {text}"
    return text.strip().partition("\n")[0] or type(error).__name__


def check(
    vllm_config: Any, settings: Settings, platform: Platform, against_trees: dict[str, bool]
) -> None:
    """Refuse a configuration, as vLLM made it, that the method does not support.

    `against_trees` is what `unsupported_by_trees` says, where trees are drafted.

    Raises:
        NotImplementedError: naming the flag to change.
        ValueError: a tree that is deeper than the context, a budget that has no draft, a draft
            model that does not fit.
    """
    options, on_v2 = settings.options, platform.on_v2
    _check_sizes(vllm_config, options)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    draft_ranks = vllm_config.speculative_config.draft_tensor_parallel_size
    if draft_ranks not in (None, ranks):
        raise NotImplementedError(
            f"draft_tensor_parallel_size: got {draft_ranks}, expected none or that of the target, "
            f"{ranks}"
        )
    if vllm_config.speculative_config.method == DRAFT_MODEL:
        _check_draft_model(vllm_config, settings, platform)
    features = unsupported(vllm_config, on_v2=on_v2) | against_trees
    # Last: others of these lead to it.
    runner = "V2" if vllm_config.use_v2_model_runner else "V1"
    runner_feature = f"Model Runner {runner}, which this configuration leads to"
    features[runner_feature] = on_v2 != vllm_config.use_v2_model_runner
    refuse(options.method, features)


def before_a_version(options: MethodOptions, *, on_v2: bool) -> dict[str, bool]:
    """What older ones of the supported versions of vLLM lack, and whether the method needs it."""
    return {
        "a GPU before vLLM 0.31": on_v2 and not FEATURES.v2_runs_trees,
        "a draft model or a trunk on a GPU before vLLM 0.32": (
            options.trunk is not None and on_v2 and not FEATURES.v2_hosts
        ),
        # vLLM's own drafts by a model fail there at the first request.
        "a trunk on a CPU before vLLM 0.31": (
            options.source == HOSTED_TRUNK and not on_v2 and not FEATURES.cpu_runs_heads
        ),
    }


def unsupported(vllm_config: Any, *, on_v2: bool) -> dict[str, bool]:
    """What the methods were not built or tested with, and whether the engine has it."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache = vllm_config.cache_config
    on_ranks = parallel.world_size_across_dp > 1
    # What vLLM's attention on a CPU has kernels for.
    cpu_cache_dtypes = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", str(model.dtype)[len("torch.") :])
    return {
        # On a CPU vLLM's own drafts end it at start-up: the first stages have no drafter.
        "--pipeline-parallel-size above 1": parallel.pipeline_parallel_size > 1,
        "--decode-context-parallel-size above 1": parallel.decode_context_parallel_size > 1,
        "--prefill-context-parallel-size above 1": parallel.prefill_context_parallel_size > 1,
        # Without speculation vLLM starts there with these two, and ends at the first request.
        "--enable-expert-parallel on several ranks on a CPU": (
            parallel.enable_expert_parallel and on_ranks and not on_v2
        ),
        f"{LOCKSTEP} on a CPU": keeps_step(vllm_config) and not on_v2,
        "--enable-elastic-ep": parallel.enable_elastic_ep,
        # vLLM has neither with speculation on Model Runner V2, and would leave that.
        "--enable-dbo or --ubatch-size": parallel.use_ubatching,
        "--enable-batch-sharded-sampling": bool(parallel.enable_batch_sharded_sampling),
        "--enable-return-routed-experts": (
            vllm_config.aux_output_config.enabled
            if FEATURES.aux_outputs
            else model.enable_return_routed_experts
        ),
        # Seen to be right on a CPU alone.
        "--kv-sharing-fast-prefill on a GPU": cache.kv_sharing_fast_prefill and on_v2,
        "--ec-transfer-config on a GPU": vllm_config.ec_transfer_config is not None and on_v2,
        # On an H100 the tokens were not plain vLLM's; the cause is not known.
        "--enable-prefix-caching with recurrent layers on a GPU": (
            bool(cache.enable_prefix_caching) and has_states(model) and on_v2
        ),
        # vLLM starts with any, and writes beyond the end of its cache.
        f"--kv-cache-dtype {cache.cache_dtype} on a CPU": (
            cache.cache_dtype not in cpu_cache_dtypes and not on_v2
        ),
        # Remove when vLLM 0.31 is dropped; later versions have no such mode.
        "--mamba-cache-mode all": cache.mamba_cache_mode == "all",
        "--watermark-config": vllm_config.watermark_config is not None,
        "--diffusion-config": vllm_config.diffusion_config is not None,
        "--logits-processors": bool(model.logits_processors),
        # With speculation vLLM leaves it out in silence.
        "an installed plugin of vllm.logits_processors": bool(
            entry_points(group="vllm.logits_processors")
        ),
        "VLLM_BATCH_INVARIANT=1": envs.VLLM_BATCH_INVARIANT,
        "--return-sampling-mask": model.return_sampling_mask,
        "--enable-trace-replay": model.enable_trace_replay,
    }


def unsupported_by_trees(vllm_config: Any, platform: Platform) -> dict[str, bool]:
    """What the kernels and the KV moves of trees do not have, and whether the engine has it."""
    on_v2, attention_backend = platform.on_v2, platform.attention_backend
    model, cache = vllm_config.model_config, vllm_config.cache_config
    attention = vllm_config.attention_config
    backend = None if attention_backend is None else attention.backend
    return {
        "--kv-transfer-config or --kv-offloading-size": vllm_config.kv_transfer_config is not None,
        f"--kv-cache-dtype {cache.cache_dtype}": cache.cache_dtype != "auto",
        # Its metadata have no room for trees.
        "--kv-sharing-fast-prefill": cache.kv_sharing_fast_prefill,
        "--enable-prompt-embeds": model.enable_prompt_embeds,
        # Its ranks must take graphs of as many rows, and ours are not chosen by these alone.
        LOCKSTEP: keeps_step(vllm_config),
        "a multimodal model without --language-model-only": takes_images(model),
        "a model with M-RoPE on a GPU": model.uses_mrope and on_v2,
        f"--attention-backend {backend and backend.name}": backend not in (None, attention_backend),
        # Of compute capability 8.x and 12.x. vLLM takes another backend there.
        "a model with attention sinks on a GPU without FlashAttention 3 or 4": (
            attention_backend is not None
            and has_sinks(model.hf_text_config)
            and not attention_backend.get_class().supports_sink()
        ),
        "--attention-config.backend_per_kind": bool(attention.backend_per_kind),
        **_attention_of("model", model),
        **platform.unsupported_by_trees(vllm_config, "model", model),
    }


def has_states(model: Any) -> bool:
    """Whether a model has recurrent layers."""
    return model.is_hybrid or model.is_attention_free


def has_sinks(config: Any) -> bool:
    """Whether a model has attention sinks, as vLLM's models read it from their configuration."""
    if config.model_type in GRANITE:
        has_types = getattr(config, "layer_types", None) is not None
        return getattr(config, "attention_sinks", has_types)
    sink_flags = (getattr(config, name, False) for name in SAY_SINKS)
    return config.model_type in WITH_SINKS or any(sink_flags)


def _attention_of(name: str, model: Any) -> dict[str, bool]:
    """The kinds of attention that trees were not built for, and whether a model has them."""
    soft_cap = getattr(model.hf_text_config, "attn_logit_softcapping", None)
    differ = getattr(model.hf_text_config, "block_configs", None)  # of Nemotron-NAS
    return {
        f"a {name} whose layers differ in KV heads": bool(differ),
        f"a {name} with reference sliding-window attention": model.rswa_window is not None,
        f"a {name} with chunked attention": model.attention_chunk_size is not None,
        f"a {name} with a logits soft cap": bool(soft_cap),
        f"a {name} with ALiBi": model.uses_alibi,
        f"a {name} with MLA": model.use_mla,
        f"an encoder-decoder {name}": model.is_encoder_decoder,
        f"a hybrid or Mamba {name}": has_states(model),
    }


def _check_sizes(vllm_config: Any, options: MethodOptions) -> None:
    """Refuse trees deeper than the context, and a budget without a token for drafts."""
    max_model_len = vllm_config.model_config.max_model_len
    if not options.is_dynamic:
        tree = options.load_tree()
        if tree.depth >= max_model_len:
            raise ValueError(
                f"tree {tree.name!r}: depth {tree.depth}, expected less than "
                f"--max-model-len {max_model_len}"
            )
    tokens = vllm_config.scheduler_config.max_num_scheduled_tokens
    share, has_room = options.budget_share, options.max_draft_tokens(tokens) >= 1
    expected = f"a token or more of --max-num-scheduled-tokens {tokens} for drafts"
    expect("budget_share", share, has_room, expected)


def _check_draft_model(vllm_config: Any, settings: Settings, platform: Platform) -> None:
    """Refuse a draft model, or sizes of drafts, that the engine has no room for."""
    options, scheduler = settings.options, vllm_config.scheduler_config
    draft = vllm_config.speculative_config.draft_model_config
    features = {
        **_attention_of("draft model", draft),
        **platform.unsupported_by_trees(vllm_config, "draft model", draft),
        "a multimodal draft model": draft.is_multimodal_model,
        "a draft model with M-RoPE": draft.uses_mrope,
    }
    refuse(options.method, features)
    max_model_len = vllm_config.model_config.max_model_len
    if draft.max_model_len < max_model_len:
        raise ValueError(
            f"--max-model-len: got {max_model_len}, expected at most the "
            f"{draft.max_model_len} tokens of the draft model {draft.model}"
        )
    table, max_num_reqs = settings.table, scheduler.max_num_seqs
    rows = options.max_draft_rows(table, max_num_reqs, on_gpu=platform.on_v2)
    if scheduler.max_num_batched_tokens < rows:
        raise ValueError(
            f"--max-num-batched-tokens: got {scheduler.max_num_batched_tokens}, expected at "
            f"least the {rows} rows of a draft forward, or smaller drafts"
        )


def other_token_ids(vllm_config: Any) -> str | None:
    """What is to be said of a draft model that has other token ids; None where they are the same.

    Such drafts are right by chance alone. Nothing is said where a model has no tokenizer.
    """
    model, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    if draft is None or model.skip_tokenizer_init:
        return None
    try:
        vocab = cached_tokenizer_from_config(model).get_vocab()
        # vLLM gives the draft model's configuration the target's tokenizer.
        draft_vocab = get_tokenizer(
            draft.model,
            tokenizer_mode=model.tokenizer_mode,
            revision=draft.revision,
            trust_remote_code=draft.trust_remote_code,
        ).get_vocab()
    except Exception as error:  # what a tokenizer raises is its own; vLLM says what it needs
        logger.debug("no tokenizers to compare: %r", error)
        return None
    num_mismatches = sum(draft_vocab.get(token) != token_id for token, token_id in vocab.items())
    if not num_mismatches:
        return None
    return (
        f"the draft model {draft.model} has other ids for {num_mismatches} of the {len(vocab)} "
        f"tokens of {model.model}: hardly a draft of it will be accepted"
    )
