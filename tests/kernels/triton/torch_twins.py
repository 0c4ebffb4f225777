"""The torch twins of the Triton kernels: plain and slow, and what is correct.

They are for tests and benchmarks alone, with the signatures of the kernels, which say what is
computed. Twins that an engine runs, where it has no compiler, are in the package.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vllm_recycle.kernels.triton.attention.queries import TreeQueries
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
        row = torch.arange(padding, padding + len(query[flat]), device=query.device)
        if not len(row):
            continue
        context = lengths[request] - padding - len(row)
        token = torch.arange(context + len(row) * (own is None), device=query.device)
        blocks, size = rows.block_table[request].long(), kv_cache.shape[2]
        pairs = kv_cache[blocks[token // size], :, token % size]
        keys, values = pairs.chunk(2, dim=-1)
        if own is not None:
            sides = zip((keys, values), own, strict=True)
            keys, values = (torch.cat((side, of_rows[flat])) for side, of_rows in sides)
        words = rows.ancestor_bits[rows.idx_mapping[request]][row[:, None], row // WORD_BITS]
        visible = F.pad(words >> row % WORD_BITS & 1, (context, 0), value=1).bool()
        given = {"scale": scale, "window": window, "sinks": sinks}
        output[flat] = attend(query[flat], keys, values, visible, **given).to(output.dtype)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """In double precision, of each row a softmax over the tokens that it sees.

    Args:
        query: [rows, heads, head_size].
        keys: [tokens, kv_heads, head_size].
        values: the same.
        visible: bool [rows, tokens]; of a row, a path from the first token on.
        scale: of the scores.
        window: so many of these tokens, the last ones: a path has each position once.
        sinks: [heads], one more score of each head, of no value.

    """
    if window is not None:
        visible = visible & (visible.flip(1).cumsum(1).flip(1) <= window)
    # What no row sees may be anything.
    values = values.masked_fill(~visible.any(dim=0)[:, None, None], 0)
    group = query.shape[1] // keys.shape[1]
    keys, values = (side.double().repeat_interleave(group, dim=1) for side in (keys, values))
    scores = scale * torch.einsum("rhd,thd->rht", query.double(), keys)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None].expand(len(query), -1, 1)), dim=2)
    weights = scores.softmax(dim=2)[..., : len(keys)]
    return torch.einsum("rht,thd->rhd", weights, values)
