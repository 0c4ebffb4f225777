"""What the CPU runner does with the rows of trees, before the forward and after the walk.

`tree_batch` says where the rows are and `backend` attends from them; here the step's inputs
are changed from chains to trees, and the KV of the accepted path is moved to where a chain's is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.kernels.cpu.kv_cache import move_slots


def prepare_trees(
    trees: StepLayout,
    *,
    positions: Sequence[torch.Tensor],
    input_ids: torch.Tensor,
    attn_groups: Sequence[Sequence[Any]],
) -> None:
    """Turn the step that was prepared for chains into one for trees.

    To be called after the slots were computed from the positions, since slots stay linear, and
    before the attention metadata are built.

    Args:
        trees: the step.
        positions: each int64 [tokens], or [dimensions, tokens] of M-RoPE, corrected in place to
            prefix + depth.
        input_ids: integer [tokens]; nodes that were not filled get a token in place.
        attn_groups: vLLM's, of each KV cache group; their builders learn of the trees.

    """
    # From a chain's positions to the tree's.
    depths = trees.trees.depths[trees.tree_requests, trees.tree_rows]
    for of_rows in positions:
        of_rows[..., trees.tree_token_rows] += depths - trees.tree_rows
    # A node that was not filled still has a row; any token will do for it.
    input_ids.clamp_(min=0)
    for groups in attn_groups:
        for group in groups:
            group.get_metadata_builder().trees = trees


def compact_kv_cache(
    trees: StepLayout,
    path: torch.Tensor,
    *,
    attn_groups: Sequence[Sequence[Any]],
    slot_mappings: Sequence[torch.Tensor],
    layers: Mapping[str, Any],
    others: Set[str] = frozenset(),
) -> None:
    """Move the KV of the accepted path to the first slots of the step, in every layer.

    Args:
        trees: the step.
        path: int64 [batch, path], the accepted rows of each tree, padded with -1.
        attn_groups: vLLM's, of each KV cache group.
        slot_mappings: integer [tokens] of each KV cache group.
        layers: attention layers by name.
        others: those among the groups that did not see the trees, a draft model's.

    """
    source, target = trees.moves(path)
    if not len(source):
        return
    for groups, slot_mapping in zip(attn_groups, slot_mappings, strict=True):
        read, write = slot_mapping[source].long(), slot_mapping[target].long()
        for group in groups:
            attention = [layers[name] for name in group.layer_names if name not in others]
            if not attention:
                continue
            # Layers may share a cache: move it once.
            caches = {layer.kv_cache.data_ptr(): layer.kv_cache for layer in attention}
            move_slots(list(caches.values()), read, write, isa=attention[0].isa)
