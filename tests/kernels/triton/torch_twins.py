"""The torch twins of the Triton kernels: plain and slow, and what is correct.

They are for tests and benchmarks alone, with the signatures of the kernels, which say what is
computed. Twins that an engine runs, where it has no compiler, are in the package.
"""

from __future__ import annotations

import torch

from vllm_recycle.kernels.triton.attention.queries import TreeQueries
from vllm_recycle.kernels.triton.ouroboros.round_starts import NO_SLOT, RoundStart
from vllm_recycle.kernels.triton.paged_layers import PagedLayers
from vllm_recycle.kernels.triton.trees import WORD_BITS, DeviceTrees


def place_tree_rows(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    *,
    trees: DeviceTrees,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    tree_indices: torch.Tensor,
) -> torch.Tensor:
    """See `vllm_recycle.kernels.triton.inputs.place_tree_rows`."""
    token_ids = input_ids[logits_indices]
    depths = trees.depths[expanded_idx_mapping, expanded_local_pos]
    positions[logits_indices] += depths - expanded_local_pos
    tree_indices[: len(idx_mapping)] = idx_mapping
    input_ids[logits_indices] = token_ids.clamp(min=0)
    return token_ids.long()


def begin_round(
    start: RoundStart,
    idx_mapping: torch.Tensor,
    *,
    texts: torch.Tensor,
    last_token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    num_cached: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> None:
    """See `vllm_recycle.kernels.triton.ouroboros.round_starts.begin_round`."""
    for row, state in enumerate(idx_mapping.tolist()):
        cached = int(num_cached[state])
        computed = min(int(num_computed[state]), cached + start.heads.shape[1] - 1)
        tokens = torch.arange(cached, computed)
        blocks = block_tables[state, tokens // block_size].long()
        start.idx_mapping[row], start.last_token_ids[row] = state, last_token_ids[state, 0]
        start.num_head[row], start.num_cached[row] = len(tokens), cached
        start.heads[row], start.slot_mapping[row] = 0, NO_SLOT
        if len(tokens):
            start.heads[row, -len(tokens) :] = texts[state, cached:computed]
            slots = blocks * block_size + tokens % block_size
            start.slot_mapping[row, -len(tokens) :] = slots
        used = -(-computed // block_size)
        start.block_table[row, :used] = block_tables[state, :used]
        num_cached[state] = computed


def compact_path(
    layers: PagedLayers,
    slot_mapping: torch.Tensor,
    logits_indices: torch.Tensor,
    cu_num_logits: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """See `vllm_recycle.kernels.triton.kv_cache.compact_path`."""
    request, place = torch.nonzero(
        path > torch.arange(path.shape[1], device=path.device), as_tuple=True
    )
    first = cu_num_logits[request].long()
    source = slot_mapping[logits_indices[first + path[request, place]]]
    target = slot_mapping[logits_indices[first + place]]
    for kv_cache in layers.kv_caches:
        size = kv_cache.shape[2]
        # The right side is a copy: all sources are read before a target is written.
        moved = kv_cache[source // size, :, source % size]
        kv_cache[target // size, :, target % size] = moved


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    *,
    rows: TreeQueries,
    scale: float,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """See `vllm_recycle.kernels.triton.attention.tree_attention.tree_attention`."""
    starts, lengths = rows.query_start_loc.tolist(), rows.seq_lens.tolist()
    paddings = [0] * rows.batch if rows.num_padding is None else rows.num_padding.tolist()
    for request, padding in enumerate(paddings):
        flat = slice(starts[request] + padding, starts[request + 1])
        num_rows, length = flat.stop - flat.start, lengths[request] - padding
        if num_rows == 0:
            continue
        cached = length if own is None else length - num_rows
        keys, values = _gather(kv_cache, rows.block_table[request], cached)
        if own is not None:
            keys, values = (
                torch.cat((context, side[flat].float()))
                for context, side in zip((keys, values), own, strict=True)
            )
        bits, depths = (
            table[rows.idx_mapping[request]] for table in (rows.ancestor_bits, rows.depths)
        )
        visible = _visible(bits, padding, num_rows, length)
        if window is not None:
            depths = depths[padding : padding + num_rows] - padding
            context = length - num_rows
            position = torch.cat((torch.arange(context, device=depths.device), context + depths))
            visible &= position > position[context:, None] - window
            # What is before all windows may be anything.
            values = values.masked_fill(~visible.any(dim=0)[:, None, None], 0)
        group = query.shape[1] // keys.shape[1]
        scores = torch.einsum(
            "rhd,thd->hrt", query[flat].float(), keys.repeat_interleave(group, dim=1)
        )
        scores = (scores * scale).masked_fill(~visible, float("-inf"))
        if sinks is not None:
            of_rows = sinks.float()[:, None, None].expand(-1, num_rows, 1)
            scores = torch.cat((scores, of_rows), dim=2)
        weights = scores.softmax(dim=-1)[:, :, :length]
        attended = torch.einsum("hrt,thd->rhd", weights, values.repeat_interleave(group, dim=1))
        output[flat] = attended.to(output.dtype)


def _gather(
    kv_cache: torch.Tensor, blocks: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a request's tokens, each float32 [length, kv_heads, head_size]."""
    token = torch.arange(length, device=kv_cache.device)
    block_size = kv_cache.shape[2]
    pairs = kv_cache[blocks[token // block_size].long(), :, token % block_size].float()
    keys, values = pairs.chunk(2, dim=-1)
    return keys, values


def _visible(ancestor_bits: torch.Tensor, first: int, num_rows: int, length: int) -> torch.Tensor:
    """bool [num_rows, length]: the whole context, and the ancestors of the rows from `first` on."""
    row = torch.arange(first, first + num_rows, device=ancestor_bits.device)
    words = ancestor_bits[row[:, None], row // WORD_BITS]
    visible = torch.ones(num_rows, length, dtype=torch.bool, device=ancestor_bits.device)
    visible[:, length - num_rows :] = (words >> row % WORD_BITS) & 1 != 0
    return visible
