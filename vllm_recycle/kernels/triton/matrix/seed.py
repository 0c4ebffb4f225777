"""The entries of prompts, a slice of a prompt at a time: see `core.learn.seed`.

All positions of a slice are taken in at once, in five launches. A position writes an entry for each
length of context that ends there; where several positions of a slice write one entry, that of the
last one stays. It has what the others of its context found as well: the followers that came last,
up to three different ones, then what was known before the slice; and it is as steady as if they had
been written one by one. What does not fit that is lost: a fourth follower within a slice, and for a
new context what the slice itself tells about its last token.

As in `learn`, integers and their order decide, so every rank computes the same. It takes the memory
of a slice. Nothing on the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
import triton
import triton.language as tl

from vllm_recycle.core.adjacency import MAX_STEADINESS, AdjacencyMatrix
from vllm_recycle.kernels.triton.matrix.find import (
    Layout,
    absorb,
    address_of,
    end_place,
    first_place,
    is_written,
    shares,
)

_MAX_STEADINESS = tl.constexpr(MAX_STEADINESS)

# Positions of a slice: the more of them, the more followers are lost, and the fewer launches.
SLICE = 4096
LANES = 32  # positions of one program


def seed(
    matrix: AdjacencyMatrix,
    stamps: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    req_state_indices: Sequence[int],
    lengths: Sequence[int],
    slice_size: int = SLICE,
) -> None:
    """Write the entries of texts: what followed comes first, then what is known.

    Sequences that have entries of their own write these alone.

    Args:
        matrix: written in place.
        stamps: int32 [addresses], zero before and after.
        token_ids: int32 [tokens], of the texts, one behind the other.
        req_state_indices: whose texts, in this order.
        lengths: of each of these texts, at least 1.
        slice_size: positions that are taken in at once.

    """
    table, layout = matrix.table, matrix.layout
    assert len(token_ids) == sum(lengths)
    assert min(lengths, default=1) > 0
    starts = [0, *accumulate(length - 1 for length in lengths)]
    num_positions = starts[-1]
    if num_positions == 0:
        return
    requests = torch.tensor([starts, [*req_state_indices, 0]], dtype=torch.int32)
    if table.is_cuda:
        requests = requests.pin_memory().to(table.device, non_blocking=True)
    size, num_lengths = min(slice_size, num_positions), len(layout.contexts)
    # So that whatever the size all tensors begin where kernels were compiled for.
    room = triton.cdiv(size, LANES) * LANES
    empty = partial(torch.empty, dtype=torch.int32, device=table.device)
    # Of each position, and of each entry that it writes.
    followers, of_salts = empty(2, room)
    heads, seconds, thirds, runs = empty(4, num_lengths, room)
    addresses, rests = empty(2, num_lengths, room, dtype=torch.int64)
    merged = empty(num_lengths, room, layout.width)
    shape = {"LENGTHS": num_lengths, "LANES": LANES, "num_warps": 1}
    for first in range(0, num_positions, size):
        count = min(size, num_positions - first)
        programs = (triton.cdiv(count, LANES), num_lengths)
        common = (stamps, addresses, heads, of_salts, followers)
        _mark_prompt_kernel[programs[:1]](
            *common,
            rests,
            seconds,
            thirds,
            runs,
            table,
            token_ids,
            matrix.salts,
            requests,
            len(lengths),
            first,
            count,
            room,
            BITS=len(matrix.salts).bit_length(),  # of any batch: compiled once
            LANES=LANES,
            LAYOUT=Layout.of(layout),
            num_warps=1,
        )
        for last in (False, True):
            _gather_kernel[programs](
                *common, seconds, thirds, runs, count, room, LAST=last, **shape
            )
        latest = (rests, seconds, thirds, runs)
        _merge_kernel[programs](merged, table, *common, *latest, count, room, K=layout.k, **shape)
        _write_prompt_kernel[programs](
            table,
            stamps,
            addresses,
            merged,
            count,
            room,
            K=layout.k,
            WIDTH=triton.next_power_of_2(layout.width),
            **shape,
        )


@triton.jit(do_not_specialize=["num_requests", "first", "count", "size"])
def _mark_prompt_kernel(
    stamps: tl.tensor,
    addresses: tl.tensor,
    heads: tl.tensor,
    of_salts: tl.tensor,
    followers: tl.tensor,
    rests: tl.tensor,
    seconds: tl.tensor,
    thirds: tl.tensor,
    runs: tl.tensor,
    table: tl.tensor,
    token_ids: tl.tensor,
    salts: tl.tensor,
    requests: tl.tensor,
    num_requests: int,
    first: int,
    count: int,
    size: int,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    LAYOUT: tl.constexpr,
) -> None:
    """A lane per position: where its entries are, who writes each last, and what was known."""
    LENGTHS: tl.constexpr = len(LAYOUT.CONTEXTS)
    position = tl.program_id(0) * LANES + tl.arange(0, LANES)
    real = position < count
    absolute = first + position
    # The last request that begins at or before it.
    request = tl.zeros([LANES], tl.int32)
    for bit in tl.static_range(BITS):
        later = request + (1 << (BITS - 1 - bit))
        begins = tl.load(requests + later, mask=later < num_requests, other=0x7FFFFFFF)
        request = tl.where(begins <= absolute, later, request)
    begins = tl.load(requests + request)
    req_state_idx = tl.load(requests + num_requests + 1 + request).to(tl.int64)
    salt = tl.load(salts + req_state_idx)
    newest_place = absolute - begins
    # The last token of each text before it has no position.
    text = token_ids + absolute + request
    follower = tl.load(text + 1, mask=real, other=-1)
    tl.store(followers + position, follower, mask=real)
    tl.store(of_salts + position, (salt * LAYOUT.HAS_OWN).to(tl.int32), mask=real)

    known = real & (follower >= 0) & (follower < LAYOUT.VOCAB)
    hashed = tl.zeros([LANES], tl.uint64)
    newest = tl.load(text, mask=real, other=-1).to(tl.int64)
    of_one = tl.full([LANES], -1, tl.int64)
    for index in tl.static_range(LENGTHS):
        for place in tl.static_range(
            first_place(LAYOUT.CONTEXTS, index), end_place(LAYOUT.CONTEXTS, index)
        ):
            # Whatever is known so far, so that no load waits for another.
            token = tl.load(text - place, mask=real & (place <= newest_place), other=-1)
            known = known & (token >= 0) & (token < LAYOUT.VOCAB)
            hashed = absorb(hashed, token)
        rest = of_one
        # The shared one of a length comes before the own one.
        for own in tl.static_range(2):
            if LAYOUT.HAS_OWN if own else LAYOUT.HAS_SHARED:
                address, head = address_of(hashed, newest, salt, index, own, LAYOUT)
                seen = known if own else shares(salt, known)
                written, _there = is_written(table, address, head, salt * own, seen, LAYOUT.K)
                rest = tl.where(written, address, rest)
                if own == LAYOUT.HAS_OWN:
                    entry = index * size + position
                    tl.atomic_max(
                        stamps + address, position * LENGTHS + index + 1, mask=seen, sem="relaxed"
                    )
                    tl.store(addresses + entry, tl.where(seen, address, -1), mask=real)
                    tl.store(heads + entry, head, mask=real)
                    tl.store(seconds + entry, 0, mask=real)
                    tl.store(thirds + entry, 0, mask=real)
                    tl.store(runs + entry, 0, mask=real)
        tl.store(rests + index * size + position, rest, mask=real)
        if index == 0:
            of_one = rest


@triton.jit(do_not_specialize=["count", "size"])
def _gather_kernel(
    stamps: tl.tensor,
    addresses: tl.tensor,
    heads: tl.tensor,
    of_salts: tl.tensor,
    followers: tl.tensor,
    seconds: tl.tensor,
    thirds: tl.tensor,
    runs: tl.tensor,
    count: int,
    size: int,
    LAST: tl.constexpr,
    LENGTHS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """What the others of its context leave with the last one: first who of another follower is
    the last of them; then who of a third one is, and how many came after the second."""
    position = tl.program_id(0) * LANES + tl.arange(0, LANES)
    index = tl.program_id(1)
    entry = index * size + position
    address = tl.load(addresses + entry, mask=position < count, other=-1)
    real = address >= 0
    number = position * LENGTHS + index + 1
    winner = tl.load(stamps + address, mask=real, other=1) - 1
    at = winner // LENGTHS
    where = winner % LENGTHS * size + at
    head = tl.load(heads + entry, mask=real, other=0)
    salt = tl.load(of_salts + position, mask=real, other=0)
    real = real & (tl.load(heads + where, mask=real, other=-1) == head)
    real = real & (tl.load(of_salts + at, mask=real, other=-1) == salt)
    follower = tl.load(followers + position, mask=real, other=-1)
    differs = real & (tl.load(followers + at, mask=real, other=-1) != follower)
    if not LAST:
        tl.atomic_max(seconds + where, number, mask=differs, sem="relaxed")
    else:
        second = tl.load(seconds + where, mask=real, other=0)
        tl.atomic_add(runs + where, 1, mask=real & (number > second), sem="relaxed")
        differs = differs & (
            tl.load(followers + (second - 1) // LENGTHS, mask=differs, other=-1) != follower
        )
        tl.atomic_max(thirds + where, number, mask=differs, sem="relaxed")


@triton.jit(do_not_specialize=["count", "size"])
def _merge_kernel(
    merged: tl.tensor,
    table: tl.tensor,
    stamps: tl.tensor,
    addresses: tl.tensor,
    heads: tl.tensor,
    of_salts: tl.tensor,
    followers: tl.tensor,
    rests: tl.tensor,
    seconds: tl.tensor,
    thirds: tl.tensor,
    runs: tl.tensor,
    count: int,
    size: int,
    LENGTHS: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """The entries that are to be written, before any is, since they are made of others."""
    position = tl.program_id(0) * LANES + tl.arange(0, LANES)
    index = tl.program_id(1)
    entry = index * size + position
    address = tl.load(addresses + entry, mask=position < count, other=-1)
    stamp = tl.load(stamps + address, mask=address >= 0, other=0)
    last = (address >= 0) & (stamp == position * LENGTHS + index + 1)
    head = tl.load(heads + entry, mask=last, other=0)
    salt = tl.load(of_salts + position, mask=last, other=0)
    first = tl.load(followers + position, mask=last, other=-1)
    second = tl.load(seconds + entry, mask=last, other=0)
    third = tl.load(thirds + entry, mask=last, other=0)
    run = tl.load(runs + entry, mask=last, other=0)

    known, old = is_written(table, address, head, salt, last & (second == 0), K)
    stays = known & (tl.load(table + address * (2 + K) + 1, mask=known, other=-1) == first)
    steadiness = tl.minimum(_MAX_STEADINESS, tl.where(stays, (old & 3) + run, run - 1))
    out = merged + entry.to(tl.int64) * (2 + K)
    tl.store(out, head | steadiness, mask=last)
    tl.store(out + 1 + K, salt, mask=last)
    num_kept = tl.zeros([LANES], tl.int32)
    one = tl.load(followers + (second - 1) // LENGTHS, mask=second > 0, other=-1)
    other = tl.load(followers + (third - 1) // LENGTHS, mask=third > 0, other=-1)
    rest = tl.load(rests + entry, mask=last, other=-1)
    for rank in range(-3, K):
        token = tl.where(rank == -3, first, tl.where(rank == -2, one, other))
        if rank >= 0:
            token = tl.load(table + rest * (2 + K) + 1 + rank, mask=rest >= 0, other=-1)
            token = tl.where((token == first) | (token == one) | (token == other), -1, token)
        kept = last & (token >= 0) & (num_kept < K)
        tl.store(out + 1 + num_kept, token, mask=kept)
        num_kept += kept.to(tl.int32)
    for rank in range(K):
        tl.store(out + 1 + rank, -1, mask=last & (rank >= num_kept))


@triton.jit(do_not_specialize=["count", "size"])
def _write_prompt_kernel(
    table: tl.tensor,
    stamps: tl.tensor,
    addresses: tl.tensor,
    merged: tl.tensor,
    count: int,
    size: int,
    LENGTHS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    position = tl.program_id(0) * LANES + tl.arange(0, LANES)
    index = tl.program_id(1)
    entry = (index * size + position).to(tl.int64)
    address = tl.load(addresses + entry, mask=position < count, other=-1)
    stamp = tl.load(stamps + address, mask=address >= 0, other=0)
    last = (address >= 0) & (stamp == position * LENGTHS + index + 1)
    column = tl.arange(0, WIDTH)[None, :]
    mask = last[:, None] & (column < 2 + K)
    value = tl.load(merged + entry[:, None] * (2 + K) + column, mask=mask, other=0)
    # All of a program's threads have read before one of them writes.
    tl.debug_barrier()
    tl.store(stamps + address, 0, mask=last)
    tl.store(table + address[:, None] * (2 + K) + column, value, mask=mask)
