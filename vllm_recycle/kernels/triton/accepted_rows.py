"""Moving the rows of an accepted path to where the rows of a chain are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# A program moves so many elements of so many rows at a time.
ELEMENTS = 256
ROWS = 8


def move_rows(
    rows: torch.Tensor,
    logits_indices: torch.Tensor,
    cu_num_logits: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """Move the rows of each accepted path to the first rows of its request.

    Args:
        rows: [tokens] or [tokens, width], what a step has for each of its tokens; changed in place.
        logits_indices, cu_num_logits, path: as for `kv_cache.compact_path`.

    """
    flat_rows = rows.view(len(rows), -1)
    width = flat_rows.shape[1]
    batch, length = path.shape
    _move_rows_kernel[(batch, triton.cdiv(width, ELEMENTS))](
        flat_rows,
        logits_indices.contiguous(),
        cu_num_logits.contiguous(),
        path.contiguous(),
        flat_rows.stride(0),
        PATH=length,
        WIDTH=width,
        ELEMENTS=min(ELEMENTS, triton.next_power_of_2(width)),
        ROWS=ROWS,
        num_warps=4,
    )


@triton.jit
def _move_rows_kernel(
    rows: tl.tensor,
    logits_indices: tl.tensor,
    cu_num_logits: tl.tensor,
    path: tl.tensor,
    row_stride: int,
    PATH: tl.constexpr,
    WIDTH: tl.constexpr,
    ELEMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """A program for a request and a part of a row's elements."""
    index = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    token_rows = logits_indices + tl.load(cu_num_logits + index)
    for start in range(0, PATH, ROWS):
        place = start + tl.arange(0, ROWS)
        row = tl.load(path + index * PATH + place, mask=place < PATH, other=-1)
        moves = row > place
        if tl.max(moves.to(tl.int32), axis=0) > 0:
            source = tl.load(token_rows + row, mask=moves, other=0).to(tl.int64) * row_stride
            target = tl.load(token_rows + place, mask=moves, other=0).to(tl.int64) * row_stride
            mask = moves[:, None] & (element < WIDTH)[None, :]
            values = tl.load(rows + source[:, None] + element[None, :], mask=mask)
            # As in `kv_cache`: no row is read that an earlier turn has written.
            tl.debug_barrier()
            tl.store(rows + target[:, None] + element[None, :], values, mask=mask)
