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
    is_filled = row < num_rows
    ancestor = tl.where(is_filled, row, 0)
    while tl.max(ancestor, axis=0) > 0:
        is_filled = is_filled & (tl.load(row_token_ids + ancestor, mask=ancestor > 0, other=0) >= 0)
        parent = tl.load(parents + ancestor, mask=ancestor > 0, other=0).to(tl.int32)
        tl.device_assert((parent < ancestor) | (ancestor == 0), "a parent behind its child")
        ancestor = parent
    is_visited = tl.zeros(row.shape, tl.int32)
    for place in range(PATH):
        is_visited |= (tl.load(path + place) == row).to(tl.int32)
    number = 1 + (2 * start).to(tl.int32) + is_visited * num_rows + row
    scratch = tl.program_id(0).to(tl.int64) * MAX_ROWS + row
    tl.store(numbers + scratch, tl.where(is_filled, number, 0), mask=row < MAX_ROWS)

    rows = tl.num_programs(0).to(tl.int64) * MAX_ROWS
    has_context = is_filled
    ancestor = tl.where(is_filled, row, 0)
    num_text_tokens = tl.zeros(row.shape, tl.int32)  # that were read
    hashed = tl.zeros(row.shape, tl.uint64)
    newest_token = tl.zeros(row.shape, tl.int64)
    for index in tl.static_range(len(LAYOUT.CONTEXTS)):
        for place in tl.static_range(
            first_place(LAYOUT.CONTEXTS, index), end_place(LAYOUT.CONTEXTS, index)
        ):
            is_node = ancestor > 0
            token = tl.load(row_token_ids + ancestor, mask=is_node, other=-1)
            token = tl.where(is_node, token, tl.gather(tail, num_text_tokens, 0).to(tl.int64))
            if place == 0:
                newest_token = token
            has_context = has_context & (token >= 0) & (token < LAYOUT.VOCAB)
            hashed = absorb(hashed, token)
            num_text_tokens += (ancestor == 0).to(tl.int32)
            ancestor = tl.load(parents + ancestor, mask=is_node, other=0).to(tl.int32)
        for own in tl.static_range(2):
            if LAYOUT.HAS_OWN if own else LAYOUT.HAS_SHARED:
                address, head = address_of(hashed, newest_token, salt, index, own, LAYOUT)
                is_writer = has_context if own else shares(salt, has_context)
                target = (2 * index + own) * rows + scratch
                stamp = number * KINDS + (2 * index + own)
                tl.atomic_max(stamps + address, stamp, mask=is_writer, sem="relaxed")
                address = tl.where(is_writer, address, -1)
                tl.store(addresses + target, address, mask=row < MAX_ROWS)
                tl.store(heads + target, head, mask=row < MAX_ROWS)
