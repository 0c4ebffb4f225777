"""Chains in recurrent layers (Mamba2, gated delta nets, short convolutions) on the V1 runner.

Their states cannot go back behind a draft that was wrong. vLLM has a block for the states behind
each row of a draft, but its CPU kernels mistake them. So these layers are not told of drafts: a
step is to them as many steps of plain decoding as its longest chain has rows, by vLLM's kernels for
those. Before each of these the states go to the next block of their request; after the walk those
behind the last visited row go back to the first, where all other steps look for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from vllm_recycle.integration.cpu.backend import part_of
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.start.shims import wrap_gated_delta_net


@dataclass(frozen=True, slots=True)
class Depth:
    """The rows of a step that a recurrent layer sees at once: one of each chain, at one depth.

    Attributes:
        rows: int64 [n], token rows; with the roots, rows of prompts.
        metadata: vLLM's, of these rows.
        source_blocks: int64 [n], the blocks of the states that they follow; none of roots.
        blocks: int64 [n], the blocks that these states go to.
    """

    rows: torch.Tensor
    metadata: Any
    source_blocks: torch.Tensor | None = None
    blocks: torch.Tensor | None = None


class RecurrentGroup:
    """Layers whose states are in the same blocks.

    Attributes:
        blocks: integer [batch, 1 + nodes], of each row of each chain the block of the states
            behind it; None for a step without drafts.
    """

    def __init__(self, group: Any, layers: dict[str, Any]) -> None:
        self.layers = [layers[name] for name in group.layer_names]
        self.builder = builder = group.get_metadata_builder()
        self.spec, self.build_plain = builder.kv_cache_spec, builder.build
        self.is_aligned = self.spec.mamba_cache_mode == "align"  # with prefix caching
        self.blocks: torch.Tensor | None = None
        # As vLLM makes it without speculation.
        builder.use_spec_decode, builder.reorder_batch_threshold = False, 1
        builder.num_spec = builder.num_spec_tokens = 0
        builder.kv_cache_spec = replace(self.spec, num_speculative_blocks=0)
        builder.build, builder.step = self.build, None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, **_: Any
    ) -> Any:
        """In the place of vLLM's; its metadata, with `depths` where the step has drafts."""
        common = common_attn_metadata
        step, self.builder.step = self.builder.step, None
        self.blocks = None
        if step is None or not any(step.num_nodes):
            return self.build_plain(0, self._moved(common, 0))
        mode = self.spec.mamba_cache_mode
        self.blocks = mamba_get_block_table_tensor(
            common.block_table_tensor, common.seq_lens, self.spec, mode
        )
        max_depth = max(step.num_nodes)
        depths = [self._depth(common, step, depth) for depth in range(max_depth + 1)]
        metadata = copy(depths[0].metadata)
        metadata.depths = depths
        return metadata

    def _moved(self, common: CommonAttentionMetadata, depth: int) -> CommonAttentionMetadata:
        """Metadata by which the states are in the blocks of this depth."""
        table = common.block_table_tensor.roll(-depth, 1)
        # vLLM's kernels take one column for granted.
        table = table if self.is_aligned else table[:, :1].contiguous()
        return common.replace(block_table_tensor=table)

    def _depth(self, common: CommonAttentionMetadata, step: StepLayout, depth: int) -> Depth:
        """The rows at one depth, with the roots all those before them."""
        starts, roots = common.query_start_loc_cpu.numpy()[:-1], np.array(step.first_token_row)
        if depth:
            [requests] = (np.array(step.num_nodes) >= depth).nonzero()
            first_rows, lengths = roots[requests] + depth, np.ones_like(requests)
        else:
            lengths = roots + 1 - starts
            has_states = (common.seq_lens > common.naive_query_lens()).numpy()
            # vLLM wants plain rows first.
            requests = np.argsort((lengths > 1) | ~has_states, kind="stable")
            first_rows, lengths = starts[requests], lengths[requests]
        rows, part = part_of(self._moved(common, depth), requests, first_rows, lengths)
        assert common.is_prefilling is not None
        part = part.replace(
            is_prefilling=common.is_prefilling[requests],
            seq_lens_cpu_upper_bound=part.seq_lens,
            _num_computed_tokens_cache=None,
        )
        metadata = self.build_plain(0, part)
        if not depth:
            return Depth(rows, metadata)
        assert self.blocks is not None
        source_blocks, blocks = self.blocks[requests, depth - 1], self.blocks[requests, depth]
        return Depth(rows, metadata, source_blocks.long(), blocks.long())

    def go_back(self, lengths: torch.Tensor) -> None:
        """Keep the states behind the last visited row.

        Args:
            lengths: integer [batch], visited rows of each request, the root included.

        """
        moved = lengths > 1
        if self.blocks is None or not moved.any():
            return
        blocks = self.blocks[moved].long()
        last_blocks = blocks.gather(1, lengths[moved, None].long() - 1).flatten()
        for layer in self.layers:
            copy_states(layer, last_blocks, blocks[:, 0])


def copy_states(layer: Any, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy all states of a layer from blocks to blocks, int64 [n] both."""
    for state in layer.kv_cache:
        state[target] = state[source]


def hide_drafts(name: str, layer: Any) -> None:
    """Let a recurrent layer that was just made see chains depth by depth.

    Raises:
        NotImplementedError: a kind of layer that this was not built for.

    """
    take_chains = next((take for kind, take in KINDS.items() if isinstance(layer, kind)), None)
    if take_chains is None:
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise NotImplementedError(
            f"layer {name}: its states are those of {type(layer).__name__}, expected one of "
            f"{kinds}; start without speculation"
        )
    layer.num_spec = 0  # by which vLLM makes its states, and chooses kernels
    take_chains(layer)


def run_by_depth(
    layer: Any,
    metadata: Any,
    forward: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    output: torch.Tensor,
) -> None:
    """Run the recurrent part of a layer on the rows of each depth.

    Args:
        layer: of vLLM.
        metadata: of the step, with `depths`.
        forward: given metadata, inputs and output of some rows, fills the output.
        inputs: [tokens, ...], each.
        output: [tokens, ...], to be filled.

    """
    for depth in metadata.depths:
        if depth.source_blocks is not None:
            copy_states(layer, depth.source_blocks, depth.blocks)
        row_output = torch.empty_like(output[depth.rows])
        forward(depth.metadata, *(tensor[depth.rows] for tensor in inputs), row_output)
        output[depth.rows] = row_output


def _has_depths(layer: Any) -> bool:
    return hasattr((get_forward_context().attn_metadata or {}).get(layer.prefix), "depths")


def _run_with_context(
    layer: Any, forward: Callable[..., Any], inputs: torch.Tensor, output: torch.Tensor
) -> None:
    """`run_by_depth` with a `forward` that takes its metadata from the forward context."""
    metadata_of = get_forward_context().attn_metadata
    step_metadata = metadata_of[layer.prefix]

    def forward_rows(metadata: Any, *tensors: torch.Tensor) -> None:
        metadata_of[layer.prefix] = metadata
        forward(*tensors)

    try:
        run_by_depth(layer, step_metadata, forward_rows, [inputs], output)
    finally:
        metadata_of[layer.prefix] = step_metadata


def _take_mamba2(layer: MambaMixer2) -> None:
    forward = layer.conv_ssm_forward

    def conv_ssm_forward(projected_states: torch.Tensor, output: torch.Tensor) -> None:
        if _has_depths(layer):
            _run_with_context(layer, forward, projected_states, output)
        else:
            forward(projected_states, output)

    layer.conv_ssm_forward = conv_ssm_forward


def _take_short_convolution(layer: ShortConv) -> None:
    forward = layer.forward_native

    def forward_native(hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        if not _has_depths(layer):
            forward(hidden_states, output)
            return
        # Its projections are for all rows at once, which reads their weights once.
        convolution = SimpleNamespace(
            prefix=layer.prefix,
            conv=layer.conv,
            kv_cache=layer.kv_cache,
            in_proj=lambda rows: (rows, None),
            out_proj=lambda rows: (rows, None),
        )
        inputs, _ = layer.in_proj(hidden_states)  # three parts of a rank's channels
        channels = inputs.new_empty(len(inputs), inputs.shape[1] // 3)
        convolve = partial(type(layer).forward_native, convolution)
        _run_with_context(layer, convolve, inputs, channels)
        output[:], _ = layer.out_proj(channels)

    layer.forward_native = forward_native


KINDS: dict[type, Callable[[Any], None]] = {
    MambaMixer2: _take_mamba2,
    ShortConv: _take_short_convolution,
    QwenGatedDeltaNetAttention: lambda _: wrap_gated_delta_net(run_by_depth),
}
