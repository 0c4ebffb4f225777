"""The kernel of tree attention: a tile of queries over a share of a request's tokens.

`queries` says what a row attends to, `tree_attention` launches it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_recycle.kernels.triton.attention.splits import (
    load_sinks,
    rows_of_request,
    share_of_context,
)


# Arguments that differ from step to step, which must not make a kernel be compiled again.
@triton.jit(
    do_not_specialize=["max_rows", "num_splits", "num_queries", "num_words"],
    do_not_specialize_on_alignment=[
        "query_start_loc",
        "seq_lens",
        "block_table",
        "num_padding",
        "idx_mapping",
    ],
)
def attend_kernel(
    query: tl.tensor,
    kv_cache: tl.tensor,
    output: tl.tensor,
    partial: tl.tensor,  # float32 [kv_heads, splits, queries, head_size]
    partial_lse: tl.tensor,  # float32 [kv_heads, splits, queries], to base 2
    ancestor_bits: tl.tensor,
    depths: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    num_padding: tl.tensor | None,
    idx_mapping: tl.tensor,
    own_keys: tl.tensor | None,
    own_values: tl.tensor | None,
    window: tl.tensor | None,
    sinks: tl.tensor | None,  # where contexts are not split
    log2_scale: tl.tensor,
    max_rows: tl.tensor,
    num_splits: tl.tensor,
    num_queries: tl.tensor,
    num_words: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    output_token_stride: tl.tensor,
    output_head_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    table_stride: tl.tensor,
    tree_stride: tl.tensor,
    depths_stride: tl.tensor,
    own_key_stride: tl.tensor | None,
    own_value_stride: tl.tensor | None,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """One tile of queries of one key head of a request, over one share of the request's tokens."""
    # Tiles that read the same keys are neighbours in the grid: all but the first hit the L2 cache.
    num_tiles = tl.cdiv(max_rows * GROUP, BLOCK_M)
    tile = tl.program_id(0) % num_tiles
    split = tl.program_id(0) // num_tiles
    kv_head = tl.program_id(1)
    request = tl.program_id(2)

    first_row, rows, padding = rows_of_request(query_start_loc, num_padding, request)
    length = tl.load(seq_lens + request) - padding
    context = length - rows
    num_cached = length if own_keys is None else context
    start, stop, share = share_of_context(length, rows, window, num_splits, BLOCK_N, LEAST_TILES)
    first_block = start + split * share
    if (tile * BLOCK_M < rows * GROUP) & (first_block < stop):
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row = m // GROUP
        head = kv_head * GROUP + m % GROUP
        is_row = row < rows
        token_row = (first_row + row).to(tl.int64)
        dim = tl.arange(0, BLOCK_D)
        query_mask = is_row[:, None] & (dim < HEAD_SIZE)[None, :]
        queries = tl.load(
            query
            + (token_row * query_token_stride + head * query_head_stride)[:, None]
            + dim[None, :],
            mask=query_mask,
            other=0.0,
        )
        tree = tl.load(idx_mapping + request).to(tl.int64)
        ancestor_bits += tree * tree_stride
        depths += tree * depths_stride
        bits = ancestor_bits + (row + padding) * num_words
        if window is not None:
            depths += padding
            min_position = _position(context + row, context, length, depths, padding) - window + 1
        table = block_table + request.to(tl.int64) * table_stride
        cache = kv_cache + kv_head.to(tl.int64) * head_stride
        if own_keys is not None:
            own_keys += first_row.to(tl.int64) * own_key_stride + kv_head * HEAD_SIZE
            own_values += first_row.to(tl.int64) * own_value_stride + kv_head * HEAD_SIZE

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if sinks is not None:
            total += 1.0
            peak = load_sinks(sinks + head, is_row)
        # No row of this tile sees further than itself.
        num_visible_tokens = context + tl.minimum(rows, tl.cdiv((tile + 1) * BLOCK_M, GROUP))
        end_block = tl.minimum(first_block + share, tl.cdiv(num_visible_tokens, BLOCK_N))
        column = tl.arange(0, BLOCK_N)
        page = _load_page(table, first_block * BLOCK_N, num_cached, BLOCK_SIZE, BLOCK_N)
        for block in range(first_block, end_block):
            token = block * BLOCK_N + column
            place = (token % BLOCK_SIZE) * token_stride + page.to(tl.int64) * block_stride
            pointer = cache + place[:, None] + dim[None, :]
            # What lies behind, or before all windows, may be anything: 0 times NaN is NaN.
            kv_mask = (token < length)[:, None]
            if window is not None:
                kv_mask = kv_mask & (token > context - window)[:, None]
            if BLOCK_D != HEAD_SIZE:
                kv_mask = kv_mask & (dim < HEAD_SIZE)[None, :]
            key = _or_own(pointer, own_keys, own_key_stride, token - context, dim)
            keys = tl.load(key, mask=kv_mask, other=0.0)
            value = _or_own(pointer + HEAD_SIZE, own_values, own_value_stride, token - context, dim)
            values = tl.load(value, mask=kv_mask, other=0.0)
            # Ahead of its use by an iteration, so that the pipeline's loads need not wait for it.
            page = _load_page(table, (block + 1) * BLOCK_N, num_cached, BLOCK_SIZE, BLOCK_N)

            scores = _dot(queries, tl.trans(keys), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), UPCAST)
            if (block + 1) * BLOCK_N > context:
                first_column = block * BLOCK_N - context + padding
                scores = _mask(scores, bits, num_words, first_column, row, rows, BLOCK_M, BLOCK_N)
            if window is not None:
                position = _position(token, context, length, depths, padding)
                scores = tl.where(position[None, :] >= min_position[:, None], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1) * log2_scale)
            # A row may have seen nothing of this share yet; -inf minus itself is NaN.
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores * log2_scale - shift[:, None])
            decay = tl.exp2(peak - shift)
            total = total * decay + tl.sum(weights, 1)
            acc = _dot(weights.to(values.dtype), values, acc * decay[:, None], UPCAST)
            peak = new_peak

        total = tl.where(total == 0.0, 1.0, total)  # A row that saw nothing: 0, of weight 2^-inf.
        acc = acc / total[:, None]
        if SPLIT:
            share_index = (kv_head * num_splits + split).to(tl.int64)
            place = share_index * num_queries + first_row * GROUP + m
            pointer = partial + place[:, None] * HEAD_SIZE + dim[None, :]
            tl.store(pointer, acc, mask=query_mask)
            tl.store(partial_lse + place, peak + tl.log2(total), mask=is_row)
        else:
            place = token_row * output_token_stride + head * output_head_stride
            pointer = output + place[:, None] + dim[None, :]
            tl.store(pointer, acc.to(output.dtype.element_ty), mask=query_mask)


@triton.jit
def _dot(lhs: tl.tensor, rhs: tl.tensor, acc: tl.tensor, UPCAST: tl.constexpr) -> tl.tensor:
    if UPCAST:  # For the interpreter, whose product of bfloat16 is one of bit patterns.
        lhs, rhs = lhs.to(tl.float32), rhs.to(tl.float32)
    return tl.dot(lhs, rhs, acc, input_precision="ieee")


@triton.jit
def _load_page(
    table: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """The page of each token from `start`, or the one that they share; 0 behind the last token."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table + start // BLOCK_SIZE, mask=start < length, other=0)
    else:
        token = start + tl.arange(0, BLOCK_N)
        return tl.load(table + token // BLOCK_SIZE, mask=token < length, other=0)


@triton.jit
def _or_own(
    pointer: tl.tensor,
    tree_pointer: tl.tensor | None,
    stride: tl.tensor | None,
    row: tl.tensor,
    dim: tl.tensor,
) -> tl.tensor:
    """Where keys or values are: those of tree rows at `tree_pointer`, if any, else in the cache."""
    if tree_pointer is None:
        return pointer
    else:
        place = row * stride  # May overflow where it is not used; wider numbers cost registers.
        return tl.where((row >= 0)[:, None], tree_pointer + place[:, None] + dim[None, :], pointer)


@triton.jit
def _position(
    token: tl.tensor,
    context: tl.tensor,
    length: tl.tensor,
    depths: tl.tensor,
    root_depth: tl.tensor,
) -> tl.tensor:
    """The position of each token: its own in the context, behind it that of its depth."""
    row = token - context
    depth = tl.load(depths + row, mask=(row >= 0) & (token < length), other=0) - root_depth
    return tl.where(row < 0, token, context + depth.to(tl.int32))


@triton.jit
def _mask(
    scores: tl.tensor,
    bits: tl.tensor,
    num_words: tl.tensor,
    first_column: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Scores of tree columns from `first_column`, -inf where the row does not see the column.

    What a row sees is a string of bits: ones for the context, whose columns are negative, then its
    ancestors, then zeros. Of it the tile's columns are read as 32-bit windows, each from the two
    words that it lies across.
    """
    column = tl.arange(0, BLOCK_N)
    word = first_column >> 5
    offset = first_column & 31
    low = _load_word(bits, word, num_words, row, rows)
    windows = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for part in tl.static_range((BLOCK_N + 31) // 32):
        high = _load_word(bits, word + part + 1, num_words, row, rows)
        pair = (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)
        window = (pair >> offset).to(tl.int32)
        windows = tl.where((column // 32 == part)[None, :], window[:, None], windows)
        low = high
    visible = (windows >> (column % 32)[None, :]) & 1
    return tl.where(visible == 1, scores, float("-inf"))


@triton.jit
def _load_word(
    bits: tl.tensor, word: tl.tensor, num_words: tl.tensor, row: tl.tensor, rows: tl.tensor
) -> tl.tensor:
    """This word of each row's string of bits: -1 before the mask, 0 behind it."""
    # The interpreter cannot `&` a scalar condition and a tensor's; it can compare with a limit.
    readable_rows = tl.where((word >= 0) & (word < num_words), rows, 0)
    loaded_bits = tl.load(bits + word, mask=row < readable_rows, other=0)
    return tl.where(word < 0, -1, loaded_bits)
