"""The entries of a prompt, in one launch: the twin of `core.learn.seed`.

One program takes a slice of positions after the other, since each reads what the ones before wrote.
A lane has an entry: all read before one writes, and as in `learn` the last writer of an entry is
known by its number. So every rank computes the same. It takes the memory of a slice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_recycle.core import learn
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
_SLICE = tl.constexpr(learn.SLICE)


def seed(
    matrix: AdjacencyMatrix, stamps: torch.Tensor, req_state_idx: int, token_ids: torch.Tensor
) -> None:
    """See `core.learn.seed`.

    Args:
        matrix: written in place.
        stamps: int32 [addresses], zero before and after.
        req_state_idx: whose text.
        token_ids: int32 [length].

    """
    layout = matrix.layout
    assert token_ids.is_contiguous()
    lanes = learn.SLICE * triton.next_power_of_2(len(layout.contexts))
    _seed_kernel[(1,)](
        torch.empty(layout.k, lanes, dtype=torch.int32, device=token_ids.device),
        matrix.table,
        stamps,
        matrix.salts,
        req_state_idx,
        token_ids,
        len(token_ids),
        LANES=lanes,
        LAYOUT=Layout.of(layout),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["req_state_idx", "length"])
def _seed_kernel(
    rest_tokens: tl.tensor,
    table: tl.tensor,
    stamps: tl.tensor,
    salts: tl.tensor,
    req_state_idx: int,
    text: tl.tensor,
    length: int,
    LANES: tl.constexpr,
    LAYOUT: tl.constexpr,
) -> None:
    """One program, with a lane per length of context and position of a slice.

    In `rest_tokens`, int32 [k, LANES], it leaves what comes behind the followers.
    """
    K: tl.constexpr = LAYOUT.K
    salt = tl.load(salts + req_state_idx)
    lane = tl.arange(0, LANES)
    index = lane // _SLICE
    number = 1 + lane % _SLICE * len(LAYOUT.CONTEXTS) + index
    first = 0
    while first < length - 1:
        position = first + lane % _SLICE
        follower = tl.load(text + position + 1, mask=position + 1 < length, other=-1)
        address, head, old_head, known_address = _find_entries(
            table, salt, text, position, index, follower, LAYOUT
        )
        tl.atomic_max(stamps + address, number, mask=address >= 0, sem="relaxed")
        top_token = tl.load(table + address * (2 + K) + 1, mask=old_head >= 0, other=-1)
        is_steady = (old_head >= 0) & (top_token == follower)
        head |= tl.where(is_steady, tl.minimum(_MAX_STEADINESS, (old_head & 3) + 1), 0)
        is_passed = tl.zeros([LANES], tl.int32)
        for rank in range(1, K):
            known_token = table + known_address * (2 + K) + rank
            is_same = tl.load(known_token, mask=known_address >= 0, other=-1) == follower
            is_passed |= is_same.to(tl.int32)
            token = tl.load(known_token + is_passed, mask=known_address >= 0, other=-1)
            tl.store(rest_tokens + rank * LANES + lane, token)
        # All have read before one writes.
        tl.debug_barrier()
        is_last = tl.load(stamps + address, mask=address >= 0, other=0) == number
        tl.debug_barrier()
        tl.store(stamps + address, 0, mask=is_last)
        entry = table + address * (2 + K)
        tl.store(entry, head, mask=is_last)
        tl.store(entry + 1, follower, mask=is_last)
        for rank in range(1, K):
            tl.store(entry + 1 + rank, tl.load(rest_tokens + rank * LANES + lane), mask=is_last)
        tl.store(entry + 1 + K, (salt * LAYOUT.HAS_OWN).to(tl.int32), mask=is_last)
        tl.debug_barrier()
        first += _SLICE


@triton.jit
def _find_entries(
    table: tl.tensor,
    salt: tl.tensor,
    text: tl.tensor,
    position: tl.tensor,
    index_of_lane: tl.tensor,
    follower: tl.tensor,
    LAYOUT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The entries of contexts that end at positions of a text, one a lane.

    Args:
        table: int32 [addresses, 2 + k].
        salt: of the sequence.
        text: pointer to its first token.
        position: int32 [lanes].
        index_of_lane: of the length of the context, among `CONTEXTS`.
        follower: int32 [lanes], the next token.

    Returns:
        Of the entry that is to be written the address, int64 [lanes], -1 for none, and the head
        without steadiness; the head that it has, -1 where it is of another context; and the address
        of what is known, -1 for none: of the context, or else of its last token.

    """
    has_context = (follower >= 0) & (follower < LAYOUT.VOCAB)
    newest_token = tl.load(text + position, mask=has_context, other=-1).to(tl.int64)
    hashed = tl.zeros(position.shape, tl.uint64)
    known_address = tl.full(position.shape, -1, tl.int64)
    address = known_address
    head = tl.zeros(position.shape, tl.int32)
    old_head = head - 1
    for index in tl.static_range(len(LAYOUT.CONTEXTS)):
        for place in tl.static_range(
            first_place(LAYOUT.CONTEXTS, index), end_place(LAYOUT.CONTEXTS, index)
        ):
            is_there = (follower >= 0) & (place <= position)
            token = tl.load(text + position - place, mask=is_there, other=-1)
            has_context = has_context & (token >= 0) & (token < LAYOUT.VOCAB)
            hashed = absorb(hashed, token)
        for own in tl.static_range(2):
            if LAYOUT.HAS_OWN if own else LAYOUT.HAS_SHARED:
                place_of, head_of = address_of(hashed, newest_token, salt, index, own, LAYOUT)
                mask = has_context & ((index_of_lane == index) | (index == 0))
                mask = mask if own else shares(salt, mask)
                is_found, found_head = is_written(
                    table, place_of, head_of, salt * own, mask, LAYOUT.K
                )
                known_address = tl.where(is_found, place_of, known_address)
                # The last one of a length is the one that is written.
                mask = mask & (index_of_lane == index)
                address = tl.where(mask, place_of, address)
                head = tl.where(mask, head_of, head)
                old_head = tl.where(mask, tl.where(is_found, found_head, -1), old_head)
    return address, head, old_head, known_address
