"""Who writes where: the first half of learning context rows, see `context_learning`."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_recycle.kernels.triton.matrix.find import absorb, place_of


@triton.jit
def mark_entries(
    numbers: tl.tensor,
    heads: tl.tensor,
    addresses: tl.tensor,
    stamps: tl.tensor,
    row: tl.tensor,
    index: tl.tensor,
    salt: tl.tensor,
    start: tl.tensor,
    num_rows: tl.tensor,
    tails: tl.tensor,
    parents: tl.tensor,
    row_token_ids: tl.tensor,
    path: tl.tensor,
    MAX_ROWS: tl.constexpr,
    PATH: tl.constexpr,
    WRITES_SHARED: tl.constexpr,
    VOCAB: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    CONTEXTS: tl.constexpr,
    HAS_OWN: tl.constexpr,
) -> None:
    """Find where some rows of one request write, and leave their numbers there.

    Numbers are those of `start` and `row`, in the order of writing. Of a row that writes nothing
    the number is 0, and of a place without a context the address is -1.
    """
    PLACES: tl.constexpr = 2 * len(CONTEXTS)
    filled = row < num_rows
    above = tl.where(filled, row, 0)
    while tl.max(above, axis=0) > 0:
        filled = filled & (tl.load(row_token_ids + above, mask=above > 0, other=0) >= 0)
        above = tl.load(parents + above, mask=above > 0, other=0).to(tl.int32)
    visited = tl.zeros(row.shape, tl.int32)
    for place in range(PATH):
        visited |= (tl.load(path + place) == row).to(tl.int32)
    number = 1 + (2 * start).to(tl.int32) + visited * num_rows + row
    scratch = index * MAX_ROWS + row
    tl.store(numbers + scratch, tl.where(filled, number, 0), mask=row < MAX_ROWS)

    rows = tl.num_programs(0).to(tl.int64) * MAX_ROWS
    known = filled
    above = tl.where(filled, row, 0)
    before = tl.zeros(row.shape, tl.int32)  # how many tokens of the text were read
    hashed = tl.zeros(row.shape, tl.uint64)
    newest = tl.zeros(row.shape, tl.int64)
    for length_index in tl.static_range(len(CONTEXTS)):
        for place in tl.static_range(
            CONTEXTS[length_index - 1] if length_index else 0, CONTEXTS[length_index]
        ):
            in_tree = above > 0
            token = tl.load(row_token_ids + above, mask=in_tree, other=-1)
            older = tl.load(tails + before, mask=known & (above == 0), other=-1)
            token = tl.where(in_tree, token, older)
            if place == 0:
                newest = token
            known = known & (token >= 0) & (token < VOCAB)
            hashed = absorb(hashed, token)
            before += (above == 0).to(tl.int32)
            above = tl.load(parents + above, mask=in_tree, other=0).to(tl.int32)
        for own in tl.static_range(2):
            if HAS_OWN if own else WRITES_SHARED:
                address, head = place_of(
                    hashed, newest, salt, CONTEXTS[length_index], own, VOCAB, SLOTS, PARTS
                )
                written = (2 * length_index + own) * rows + scratch
                stamp = number * PLACES + (2 * length_index + own)
                tl.atomic_max(stamps + address, stamp, mask=known, sem="relaxed")
                address = tl.where(known, address, -1)
                tl.store(addresses + written, address, mask=row < MAX_ROWS)
                tl.store(heads + written, head, mask=row < MAX_ROWS)
