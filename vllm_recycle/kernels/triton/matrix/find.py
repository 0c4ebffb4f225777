"""Where context rows are: device functions that growing and learning share, a lane a context.

Twins of `core.adjacency`, number for number: a table, wherever it was written, is read
the same. A context is eight tokens or fewer in memory, the newest first, -1 behind the last one.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from vllm_recycle.core import adjacency
from vllm_recycle.core.adjacency import MatrixLayout

_MIX = tl.constexpr(adjacency._MIX)
_FINISH = tl.constexpr(adjacency._FINISH)
_TAG_SHIFT = tl.constexpr(adjacency._TAG_SHIFT)


def constants_of(layout: MatrixLayout) -> dict[str, Any]:
    """What kernels that find rows are compiled with."""
    return {
        "VOCAB": layout.vocab_size,
        "K": layout.k,
        "SLOTS": layout.slots,
        "PARTS": layout.parts,
        "CONTEXTS": layout.contexts,
        "HAS_OWN": layout.has_own,
        "READS_SHARED": layout.reads_shared,
    }


@triton.jit
def absorb(hashed: tl.tensor, token: tl.tensor) -> tl.tensor:
    """uint64, the hash of a context that is one older token longer; that of none is 0."""
    hashed = (hashed ^ (token.to(tl.uint64) + 1)) * _MIX
    return hashed ^ (hashed >> 32)


@triton.jit
def place_of(
    hashed: tl.tensor,
    newest: tl.tensor,
    salt: tl.tensor,
    LENGTH: tl.constexpr,
    OWN: tl.constexpr,
    VOCAB: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Address, int64, and head without steadiness, int32, of the row of a context.

    Args:
        hashed: uint64, of the tokens of the context.
        newest: the first of them.
        salt: of the sequence, of any integer type; the row carries it if it is its own, else 0.

    """
    if LENGTH == 1 and not OWN:
        return newest.to(tl.int64), newest.to(tl.int32) << 3
    else:
        key = hashed + LENGTH
        if OWN and PARTS == 1:
            key += salt.to(tl.uint64) * _FINISH
        key = key * _FINISH
        key = (key ^ (key >> 29)) * _MIX
        head = ((key >> _TAG_SHIFT) << 3).to(tl.int32) | (OWN << 2)
        address = VOCAB + (key & (SLOTS // PARTS - 1)).to(tl.int64)
        if PARTS > 1:
            address += (salt & (PARTS - 1)).to(tl.int64) * (SLOTS // PARTS)
        return address, head


@triton.jit
def is_written(
    table: tl.tensor,
    address: tl.tensor,
    head: tl.tensor,
    salt: tl.tensor,
    real: tl.tensor,
    K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Whether the row there is the one of this head and salt; and the head that is there."""
    row = table + address * (2 + K)
    written = tl.load(row, mask=real, other=-1)
    salted = tl.load(row + (1 + K), mask=real, other=-1)
    return real & ((written >> 2) == (head >> 2)) & (salted == salt), written


@triton.jit
def find_entry(
    table: tl.tensor,
    context: tl.tensor,
    stride: tl.tensor,
    salt: tl.tensor,
    real: tl.tensor,
    VOCAB: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    CONTEXTS: tl.constexpr,
    HAS_OWN: tl.constexpr,
    READS_SHARED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The row to draft from: that of the longest context that is known, an own one first.

    Tokens do not wait for each other, nor do rows: two latencies of memory in all.

    Args:
        table: int32 [addresses, 2 + k].
        context: pointers [lanes] to the newest tokens, up to the longest of `CONTEXTS` of which
            may be read.
        stride: from a token to the next older one.
        salt: of each lane's sequence.
        real: [lanes], whether a lane has a context; the others find nothing.

    Returns:
        Address, int64 [lanes], -1 where nothing is known; index of the length among `CONTEXTS`,
        1 where it is an own row, and head with steadiness, each int32 [lanes].

    """
    hashed = tl.zeros(real.shape, tl.uint64)
    found = tl.full(real.shape, -1, tl.int64)
    found_index = tl.zeros(real.shape, tl.int32)
    found_own = tl.zeros(real.shape, tl.int32)
    found_head = tl.zeros(real.shape, tl.int32)
    newest = tl.load(context, mask=real, other=-1)
    salt = salt.to(tl.int64)
    known = real
    for index in tl.static_range(len(CONTEXTS)):
        for place in tl.static_range(CONTEXTS[index - 1] if index else 0, CONTEXTS[index]):
            token = tl.load(context + place * stride, mask=real, other=-1)
            known = known & (token >= 0) & (token < VOCAB)
            hashed = absorb(hashed, token)
        # The shared one of a length comes before the own one.
        for own in tl.static_range(2):
            if HAS_OWN if own else READS_SHARED:
                address, head = place_of(
                    hashed, newest, salt, CONTEXTS[index], own, VOCAB, SLOTS, PARTS
                )
                written, there = is_written(table, address, head, salt * own, known, K)
                found = tl.where(written, address, found)
                found_index = tl.where(written, index, found_index)
                found_own = tl.where(written, own, found_own)
                found_head = tl.where(written, there, found_head)
    return found, found_index, found_own, found_head
