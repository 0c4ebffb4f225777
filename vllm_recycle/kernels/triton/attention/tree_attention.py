"""Tree attention over vLLM's paged KV cache on CUDA: split-KV flash attention under bit masks.

`queries` says what a row attends to, and names the dimensions. One program serves a tile of
queries, the rows of a tree times the heads that share a key, so that keys and values are read once
for all of them. Long contexts are split over programs, and a second kernel combines what these
found.

Launches depend on shapes alone: nothing is read from the device, and a captured CUDA graph stays
valid when lengths, block tables and the rows of requests change.
"""

from __future__ import annotations

import torch
import triton

from vllm_recycle.kernels.triton.attention.kernel import attend_kernel
from vllm_recycle.kernels.triton.attention.queries import TreeQueries
from vllm_recycle.kernels.triton.attention.splits import (
    COMBINED_QUERIES,
    COMBINED_SPLITS,
    LOG2_E,
    combine_kernel,
)
from vllm_recycle.kernels.triton.attention.tiles import (
    Tile,
    choose_num_splits,
    choose_tile,
    processors_and_capability,
)

# Tokens of a request that are worth a program of their own: with fewer, writing what it found and
# combining it costs more than it saves.
LEAST_SHARE = 128


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
    num_splits: int | None = None,
    tile: Tile | None = None,
) -> None:
    """Attend from every tree row to its context and its ancestors; their KV is written already.

    Args:
        query: float16, bfloat16 or float32 [tokens, heads, head_size], of any row and head stride;
            its last dimension, and those of the other two, contiguous.
        kv_cache: [blocks, kv_heads, block_size, 2 * head_size] of the same type, keys before
            values, of any strides but the last.
        output: [tokens, heads, head_size] of any floating type, written at the rows of the trees
            and nowhere else.
        rows: the requests, their blocks and the mask.
        scale: of the scores, positive.
        own: keys and values of the forward's rows, of the cache's type, each
            [tokens, kv_heads, head_size], of any token stride. Where given, the trees' rows have
            theirs from here, and nothing behind the context is read from the cache.
        window: of the layer, how many positions up to its own a row sees; None for all.
        sinks: floating point [heads], a score, scaled already, that each head's softmax has beside
            those of the keys, and that no value belongs to; None for none.
        num_splits: shares of each context, chosen from the shapes where none is given.
        tile: likewise.

    """
    _, heads, head_size = query.shape
    _, kv_heads, block_size, _ = kv_cache.shape
    group = heads // kv_heads
    assert kv_cache.dtype == query.dtype
    assert kv_cache.shape[3] == 2 * head_size
    assert query.stride(2) == kv_cache.stride(3) == output.stride(2) == 1
    assert rows.block_table.stride(1) == 1
    assert rows.ancestor_bits[0].is_contiguous()
    assert rows.depths.stride(1) == 1
    assert scale > 0
    assert sinks is None or (sinks.is_contiguous() and len(sinks) == heads)
    own_keys, own_values = own or (None, None)
    for side in own or ():
        assert side.dtype == query.dtype
        assert side.stride()[1:] == (head_size, 1)

    processors, _ = processors_and_capability(query.device)
    num_queries = rows.max_rows * group
    all_queries = min(query.shape[0] * group, rows.batch * num_queries)
    tile = tile or _tile_of(query, num_queries)
    tiles = triton.cdiv(num_queries, tile.queries)
    if num_splits is None:
        slots = processors * tile.resident
        # So many requests may have so many rows: programs of others have less to do, or nothing.
        full = min(rows.batch, triton.cdiv(query.shape[0], rows.max_rows))
        num_splits = choose_num_splits(full * kv_heads * tiles, slots)
        if window is not None:
            most = triton.cdiv(window + rows.max_rows, LEAST_SHARE)
            num_splits = min(num_splits, most)

    partial, partial_lse = output, output  # never touched without splits
    if num_splits > 1:
        # By the rows of the launch: of most requests that a graph has room for there are none.
        shape = (kv_heads, num_splits, all_queries)
        partial = query.new_empty(*shape, head_size, dtype=torch.float32)
        partial_lse = query.new_empty(shape, dtype=torch.float32)
    shared = {
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "BLOCK_D": triton.next_power_of_2(head_size),
        "BLOCK_N": tile.tokens,
        "LEAST_TILES": max(1, LEAST_SHARE // tile.tokens),
    }
    attend_kernel[(tiles * num_splits, kv_heads, rows.batch)](
        query,
        kv_cache,
        output,
        partial,
        partial_lse,
        rows.ancestor_bits,
        rows.depths,
        rows.query_start_loc,
        rows.seq_lens,
        rows.block_table,
        rows.num_padding,
        rows.idx_mapping,
        own_keys,
        own_values,
        window,
        sinks if num_splits == 1 else None,
        scale * LOG2_E,
        rows.max_rows,
        num_splits,
        all_queries,
        rows.ancestor_bits.shape[-1],
        query.stride(0),
        query.stride(1),
        output.stride(0),
        output.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        rows.block_table.stride(0),
        rows.ancestor_bits.stride(0),
        rows.depths.stride(0),
        own_keys.stride(0) if own_keys is not None else None,
        own_values.stride(0) if own_values is not None else None,
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.queries,
        SPLIT=num_splits > 1,
        UPCAST=query.device.type == "cpu",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **shared,
    )
    if num_splits > 1:
        combine_kernel[(triton.cdiv(num_queries, COMBINED_QUERIES), kv_heads, rows.batch)](
            partial,
            partial_lse,
            output,
            rows.query_start_loc,
            rows.seq_lens,
            rows.num_padding,
            window,
            sinks,
            num_splits,
            all_queries,
            output.stride(0),
            output.stride(1),
            BLOCK_M=COMBINED_QUERIES,
            CHUNK=COMBINED_SPLITS,
            **shared,
        )


def _tile_of(query: torch.Tensor, num_queries: int) -> Tile:
    _, capability = processors_and_capability(query.device)
    return choose_tile(
        num_queries, query.shape[2], itemsize=query.element_size(), capability=capability
    )


def rows_of_tiles(query: torch.Tensor, group: int, max_rows: int) -> list[int]:
    """Numbers of rows up to the largest that have among them each tile that any number has.

    `query` is as that of `tree_attention`, of any rows.
    """
    return [*{_tile_of(query, rows * group): rows for rows in range(1, max_rows + 1)}.values()]
