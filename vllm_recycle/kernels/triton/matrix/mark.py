"""Who writes where: the first half of learning from a step, see `learn`."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_recycle.kernels.triton.matrix.find import (
    absorb,
    address_of,
    end_place,
    first_place,
    shares,
)


@triton.jit
def mark_entries(
    numbers: tl.tensor,
    heads: tl.tensor,
    addresses: tl.tensor,
    stamps: tl.tensor,
    row: tl.tensor,
    salt: tl.tensor,
    start: tl.tensor,
    num_rows: tl.tensor,
    tail: tl.tensor,
    parents: tl.tensor,
    row_token_ids: tl.tensor,
    path: tl.tensor,
    MAX_ROWS: tl.constexpr,
    PATH: tl.constexpr,
    LAYOUT: tl.constexpr,
) -> None:
    """Find the entries that some rows of one request write, and leave the rows' numbers there.

    Numbers are those of `start` and `row`, in the order of writing. A row that writes nothing has
    the number 0, and a kind of entry without a context the address -1.
    """
    KINDS: tl.constexpr = 2 * len(LAYOUT.CONTEXTS)
    filled = row < num_rows
    above = tl.where(filled, row, 0)
    while tl.max(above, axis=0) > 0:
        filled = filled & (tl.load(row_token_ids + above, mask=above > 0, other=0) >= 0)
        parent = tl.load(parents + above, mask=above > 0, other=0).to(tl.int32)
        tl.device_assert((parent < above) | (above == 0), "a parent behind its child")
        above = parent
    visited = tl.zeros(row.shape, tl.int32)
    for place in range(PATH):
        visited |= (tl.load(path + place) == row).to(tl.int32)
    number = 1 + (2 * start).to(tl.int32) + visited * num_rows + row
    scratch = tl.program_id(0).to(tl.int64) * MAX_ROWS + row
    tl.store(numbers + scratch, tl.where(filled, number, 0), mask=row < MAX_ROWS)

    rows = tl.num_programs(0).to(tl.int64) * MAX_ROWS
    known = filled
    above = tl.where(filled, row, 0)
    before = tl.zeros(row.shape, tl.int32)  # how many tokens of the text were read
    hashed = tl.zeros(row.shape, tl.uint64)
    newest = tl.zeros(row.shape, tl.int64)
    for index in tl.static_range(len(LAYOUT.CONTEXTS)):
        for place in tl.static_range(
            first_place(LAYOUT.CONTEXTS, index), end_place(LAYOUT.CONTEXTS, index)
        ):
            in_tree = above > 0
            token = tl.load(row_token_ids + above, mask=in_tree, other=-1)
            token = tl.where(in_tree, token, tl.gather(tail, before, 0).to(tl.int64))
            if place == 0:
                newest = token
            known = known & (token >= 0) & (token < LAYOUT.VOCAB)
            hashed = absorb(hashed, token)
            before += (above == 0).to(tl.int32)
            above = tl.load(parents + above, mask=in_tree, other=0).to(tl.int32)
        for own in tl.static_range(2):
            if LAYOUT.HAS_OWN if own else LAYOUT.HAS_SHARED:
                address, head = address_of(hashed, newest, salt, index, own, LAYOUT)
                real = known if own else shares(salt, known)
                written = (2 * index + own) * rows + scratch
                stamp = number * KINDS + (2 * index + own)
                tl.atomic_max(stamps + address, stamp, mask=real, sem="relaxed")
                address = tl.where(real, address, -1)
                tl.store(addresses + written, address, mask=row < MAX_ROWS)
                tl.store(heads + written, head, mask=row < MAX_ROWS)
