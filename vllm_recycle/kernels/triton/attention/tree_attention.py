"""Tree attention over vLLM's paged KV cache on CUDA: split-KV flash attention under bit masks.

`queries` says what a row attends to, and names the dimensions. One program serves a tile of
queries, the rows of a tree times the heads that share a key, so that keys and values are read once
for all of them. Long contexts are split over programs, and a second kernel combines what these
found.

Launches depend on shapes alone: nothing is read from the device, and a captured CUDA graph stays
valid when lengths, block tables and the rows of requests change. What is the same for all layers of
a step is made for the first of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

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
from vllm_recycle.kernels.triton.launch import ALIGNMENT, bind

# Tokens of a request that are worth a program of their own: with fewer, writing what it found and
# combining it costs more than it saves.
LEAST_SHARE = 128
# Kernels are compiled or not by what is said when they are imported.
INTERPRETED: bool = triton.knobs.runtime.interpret


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
    own_keys, own_values = own or (None, None)
    tensors: dict[str, Any] = {
        "query": query,
        "kv_cache": kv_cache,
        "output": output,
        "own_keys": own_keys,
        "own_values": own_values,
        "sinks": sinks,
    }
    kind = (*map(_form_of, tensors.values()), scale, window, num_splits, tile)
    launch = rows.launches.get(kind)
    if launch is None:
        assert scale > 0
        _check(rows, tensors)
        tile = tile or _tile_of(query, rows.max_rows * query.shape[1] // kv_cache.shape[1])
        num_splits = num_splits or _num_splits_of(query, kv_cache, rows, tile, window)
        numbers = {"window": window, "log2_scale": scale * LOG2_E, "num_splits": num_splits}
        launch = rows.launches[kind] = _plan(rows, tile, numbers, tensors)
    launch(tensors)


def _form_of(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """What a launch depends on, of a tensor that each layer has for itself."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % ALIGNMENT


def _check(rows: TreeQueries, tensors: dict[str, Any]) -> None:
    query, kv_cache, output, *own_tensors, sinks = tensors.values()
    _, heads, head_size = query.shape
    assert kv_cache.dtype == query.dtype
    assert kv_cache.shape[3] == 2 * head_size
    assert query.stride(2) == kv_cache.stride(3) == output.stride(2) == 1
    assert rows.block_table.stride(1) == 1
    assert rows.ancestor_bits[0].is_contiguous()
    assert rows.depths.stride(1) == 1
    assert sinks is None or (sinks.is_contiguous() and len(sinks) == heads)
    for tensor in own_tensors:
        assert tensor is None or tensor.dtype == query.dtype
        assert tensor is None or tensor.stride()[1:] == (head_size, 1)


def _plan(
    rows: TreeQueries, tile: Tile, numbers: dict[str, Any], tensors: dict[str, Any]
) -> Callable[[dict[str, Any]], None]:
    """The launches of a layer, and of all that differ from it by these tensors alone."""
    query, kv_cache, output, own_keys, own_values, _ = tensors.values()
    (tokens, heads, head_size), (_, kv_heads, block_size, _) = query.shape, kv_cache.shape
    group, num_splits = heads // kv_heads, numbers["num_splits"]
    num_queries = rows.max_rows * group
    # By the rows of the launch: of most requests that a graph has room for there are none.
    all_queries = min(tokens * group, rows.batch * num_queries)
    arguments = numbers | {
        **{field.name: getattr(rows, field.name) for field in fields(rows)},
        "num_queries": all_queries,
        "num_words": rows.ancestor_bits.shape[-1],
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "output_token_stride": output.stride(0),
        "output_head_stride": output.stride(1),
        "block_stride": kv_cache.stride(0),
        "head_stride": kv_cache.stride(1),
        "token_stride": kv_cache.stride(2),
        "table_stride": rows.block_table.stride(0),
        "tree_stride": rows.ancestor_bits.stride(0),
        "depths_stride": rows.depths.stride(0),
        "own_key_stride": None if own_keys is None else own_keys.stride(0),
        "own_value_stride": None if own_values is None else own_values.stride(0),
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "BLOCK_N": tile.tokens,
        "BLOCK_D": triton.next_power_of_2(head_size),
        "LEAST_TILES": max(1, LEAST_SHARE // tile.tokens),
        "SPLIT": num_splits > 1,
        "UPCAST": INTERPRETED,
    }
    grid = (triton.cdiv(num_queries, tile.queries) * num_splits, kv_heads, rows.batch)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    attend = bind(attend_kernel, grid, arguments | {"BLOCK_M": tile.queries}, **options)
    if num_splits == 1:
        return partial(_attend, attend)
    grid = (triton.cdiv(num_queries, COMBINED_QUERIES), kv_heads, rows.batch)
    arguments |= {"BLOCK_M": COMBINED_QUERIES, "CHUNK": COMBINED_SPLITS}
    combine = bind(combine_kernel, grid, arguments)
    return partial(_attend_and_combine, attend, combine, (kv_heads, num_splits, all_queries))


def _attend(attend: Callable, tensors: dict[str, Any]) -> None:
    output = tensors["output"]
    attend(tensors | {"partial": output, "partial_lse": output})  # never touched without splits


def _attend_and_combine(
    attend: Callable, combine: Callable, shape: tuple[int, ...], tensors: dict[str, Any]
) -> None:
    """`shape` is of what shares find: [kv_heads, splits, queries]."""
    output = tensors["output"]
    new_empty = partial(output.new_empty, dtype=torch.float32)
    partials = {"partial": new_empty((*shape, output.shape[2])), "partial_lse": new_empty(shape)}
    attend(tensors | partials | {"sinks": None})
    combine(partials | {"output": output, "sinks": tensors["sinks"]})


def _num_splits_of(
    query: torch.Tensor, kv_cache: torch.Tensor, rows: TreeQueries, tile: Tile, window: int | None
) -> int:
    processors, _ = processors_and_capability(query.device)
    kv_heads = kv_cache.shape[1]
    programs = kv_heads * triton.cdiv(rows.max_rows * query.shape[1] // kv_heads, tile.queries)
    # So many requests may have so many rows: programs of others have less to do, or nothing.
    num_full = min(rows.batch, triton.cdiv(query.shape[0], rows.max_rows))
    slots = processors * tile.resident
    num_splits = choose_num_splits(num_full * programs, (rows.batch - num_full) * programs, slots)
    if window is not None:
        num_splits = min(num_splits, triton.cdiv(window + rows.max_rows, LEAST_SHARE))
    return num_splits


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
