"""Contexts that are split over programs: who takes which share, and what all of them found."""

from __future__ import annotations

import math

import triton
import triton.language as tl

# The combining kernel's tile: it reads this many splits at once, of this many queries.
COMBINED_SPLITS = 8
COMBINED_QUERIES = 4

LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def share_of_context(
    length: tl.tensor,
    rows: tl.tensor,
    window: tl.tensor | None,
    num_splits: tl.tensor,
    BLOCK_N: tl.constexpr,
    LEAST_TILES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The blocks of BLOCK_N tokens that a request's rows see, and how many of them a share takes.

    Returns:
        The first block, the one behind the last, and the blocks of a share.

    """
    start = 0
    if window is not None:  # No row's begins before the root's.
        start = tl.maximum(length - rows - window + 1, 0) // BLOCK_N
    stop = tl.cdiv(length, BLOCK_N)
    return start, stop, tl.maximum(tl.cdiv(stop - start, num_splits), LEAST_TILES)


@triton.jit(
    do_not_specialize=["num_splits", "num_queries"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "num_padding"],
)
def combine_kernel(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    output: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    num_padding: tl.tensor | None,
    window: tl.tensor | None,
    sinks: tl.tensor | None,
    num_splits: tl.tensor,
    num_queries: tl.tensor,
    output_token_stride: tl.tensor,
    output_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Some queries of one key head of a request, over all the shares that had tokens."""
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    first_row, rows, padding = rows_of_request(query_start_loc, num_padding, request)
    length = tl.load(seq_lens + request) - padding
    start, stop, share = share_of_context(length, rows, window, num_splits, BLOCK_N, LEAST_TILES)
    if tl.program_id(0) * BLOCK_M < rows * GROUP:
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        row = m // GROUP
        head = kv_head * GROUP + m % GROUP
        is_row = row < rows
        dim = tl.arange(0, BLOCK_D)
        query_mask = is_row[:, None] & (dim < HEAD_SIZE)[None, :]
        first_share = (kv_head * num_splits).to(tl.int64)
        query = first_row * GROUP + m

        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        # Rows that are none weigh 1 and have nothing, so that nothing of theirs is NaN.
        total = tl.where(is_row, 0.0, 1.0)
        peak = tl.where(is_row, float("-inf"), 0.0)
        if sinks is not None:
            total = tl.full([BLOCK_M], 1.0, tl.float32)
            peak = load_sinks(sinks + head, is_row)
        num_shares = tl.cdiv(stop - start, share)
        for first_split in range(0, num_shares, CHUNK):
            split = first_split + tl.arange(0, CHUNK)
            is_share = split < num_shares
            place = (first_share + split)[:, None] * num_queries + query[None, :]
            lse = tl.load(
                partial_lse + place, mask=is_share[:, None] & is_row[None, :], other=float("-inf")
            )
            outputs = tl.load(
                partial + place[:, :, None] * HEAD_SIZE + dim[None, None, :],
                mask=is_share[:, None, None] & query_mask[None, :, :],
                other=0.0,
            )
            # Every row sees a token of the first shares, so that the peak is finite from there on:
            # its window begins at most a tree's depth behind the root's, and they are longer.
            new_peak = tl.maximum(peak, tl.max(lse, 0))
            weights = tl.exp2(lse - new_peak[None, :])
            decay = tl.exp2(peak - new_peak)
            total = total * decay + tl.sum(weights, 0)
            acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * outputs, 0)
            peak = new_peak
        place = (first_row + row).to(tl.int64) * output_token_stride + head * output_head_stride
        pointer = output + place[:, None] + dim[None, :]
        tl.store(pointer, (acc / total[:, None]).to(output.dtype.element_ty), mask=query_mask)


@triton.jit
def rows_of_request(
    query_start_loc: tl.tensor, num_padding: tl.tensor | None, request: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The flat row at which a request's tree begins, how many it has, and how many it lacks."""
    padding = 0 if num_padding is None else tl.load(num_padding + request)
    first_row = tl.load(query_start_loc + request) + padding
    return first_row, tl.load(query_start_loc + request + 1) - first_row, padding


@triton.jit
def load_sinks(pointer: tl.tensor, is_row: tl.tensor) -> tl.tensor:
    """What each query's softmax has beside the keys, a score to base 2; 0 where there is no row."""
    return tl.load(pointer, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
