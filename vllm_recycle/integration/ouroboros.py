"""What the drafters of Ouroboros share, whatever the runner: the proposer and what it tells."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from vllm_recycle.core.paper.ouroboros import OuroborosProposer
from vllm_recycle.integration.options import OuroborosOptions, settings_of


def group_of_draft_layers(kv_cache_config: Any, layer_names: Set[str], max_model_len: int) -> int:
    """The KV cache group that the layers of a draft model, which must share one, are in."""
    groups = kv_cache_config.kv_cache_groups
    holding = [i for i, group in enumerate(groups) if not layer_names.isdisjoint(group.layer_names)]
    if len(holding) != 1:
        raise NotImplementedError(
            f"ouroboros: the draft model's layers are in {len(holding)} KV cache groups, "
            "expected one; use a draft model whose layers have the same kind of attention"
        )
    spec = groups[holding[0]].kv_cache_spec
    spec = getattr(spec, "first_spec", spec)
    if isinstance(spec, SlidingWindowSpec) and spec.sliding_window < max_model_len:
        # Tokens that it has yet to take in may lie in blocks that vLLM has given to others.
        raise NotImplementedError(
            f"ouroboros: the draft model has a sliding window of {spec.sliding_window} tokens, "
            f"expected none, or no fewer than --max-model-len {max_model_len}"
        )
    return holding[0]


def refuse_shared_caches(layer_names: Set[str], compilation_config: Any) -> None:
    """Refuse a draft model of these layers where one reads the KV cache of another."""
    for name in sorted(layer_names):
        layer = compilation_config.static_forward_context[name]
        if layer.kv_sharing_target_layer_name is not None:
            raise NotImplementedError(
                f"ouroboros does not support a draft model whose layers share a KV cache, as "
                f"{name} does; choose another model"
            )


def make_proposer(vllm_config: Any, device: torch.device) -> OuroborosProposer:
    """The proposer that an engine's options ask for, with its pool on a device."""
    options = settings_of(vllm_config).options
    assert isinstance(options, OuroborosOptions)
    return OuroborosProposer(
        options,
        vocab_size=vllm_config.model_config.get_vocab_size(),
        max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
        shares_pool=options.shares_pool,
        device=device,
    )


def describe_draft_model(vllm_config: Any, gamma: int) -> str:
    """What a line that says what is on begins with."""
    return (
        f"ouroboros: draft model {vllm_config.speculative_config.draft_model_config.model}, "
        f"gamma {gamma}"
    )


def describe(proposer: OuroborosProposer, vllm_config: Any) -> str:
    """One line: what is on."""
    shape, pool = proposer.shape, proposer.pool
    return (
        f"{describe_draft_model(vllm_config, shape.gamma)}, window {shape.window}, "
        f"guesses {shape.guesses}, phrase length {shape.phrase_length}, branches "
        f"{shape.branches}, at most {proposer.max_forwards} "
        f"draft forwards, {pool.num_phrases} phrases known, {pool.table.nbytes:,} bytes"
    )
