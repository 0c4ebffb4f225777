"""Where entries are: device functions that drafting and learning share, a lane per context.

Twins of `core.adjacency`, number for number: a table is read the same wherever it was written. A
context is as many tokens in memory as the longest has, the newest first, -1 behind the last one.
"""

from __future__ import annotations

from dataclasses import astuple
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_recycle.core import adjacency, owners
from vllm_recycle.core.adjacency import NUM_CLASSES, AdjacencyMatrix, MatrixLayout

_MIX = tl.constexpr(adjacency._MIX)
_FINISH = tl.constexpr(adjacency._FINISH)
_TAG_SHIFT = tl.constexpr(adjacency._TAG_SHIFT)
_PRIVATE_SALT = tl.constexpr(owners.PRIVATE_SALT)


class Layout(NamedTuple):
    """A `MatrixLayout`, as kernels are compiled for it."""

    VOCAB: int
    K: int
    CONTEXTS: tuple[int, ...]
    SLOTS: int
    HAS_OWN: bool
    HAS_SHARED: bool
    PARTS: int
    REACH: int
    CONTEXT_LANES: int  # a power of two, at least REACH
    RANKS: int  # that are counted of a class

    @classmethod
    @cache  # Each launch asks for it.
    def of(cls, layout: MatrixLayout) -> Layout:
        lanes, ranks = triton.next_power_of_2(layout.reach), len(layout.contexts) * 2 * layout.k
        return cls._make((*astuple(layout), layout.reach, lanes, ranks))


class Texts(NamedTuple):
    """The texts of all requests, of which kernels read the ends.

    Attributes:
        token_ids: int32 [max_num_reqs, max_model_len], of the device or mapped for it.
        lengths: int32 [max_num_reqs], the tokens of each text.

    """

    token_ids: torch.Tensor
    lengths: torch.Tensor


def inputs_of(
    drafts: torch.Tensor,
    worths: torch.Tensor,
    matrix: AdjacencyMatrix,
    rates: torch.Tensor,
    idx_mapping: torch.Tensor,
    texts: Texts,
) -> tuple[torch.Tensor | int, ...]:
    """What the kernels that draft read, checked; see `grow` and `fill`."""
    layout = matrix.layout
    assert rates.shape == (NUM_CLASSES, len(layout.contexts), 2, layout.k, 4)
    tables = (matrix.table, rates, idx_mapping, matrix.salts, matrix.classes)
    for tensor in (drafts, worths, *tables):
        assert tensor.is_contiguous()
    assert texts.token_ids.stride(1) == 1
    return *tables, texts.token_ids, texts.token_ids.stride(0), texts.lengths


# First and last place of what a context has more than the next shorter one. In Triton 3.7 an index
# expression in a kernel gives no constant, which `tl.static_range` needs.
@triton.constexpr_function
def first_place(contexts: tuple[int, ...], index: int) -> int:
    return contexts[index - 1] if index else 0


@triton.constexpr_function
def end_place(contexts: tuple[int, ...], index: int) -> int:
    return contexts[index]


@triton.jit
def read_tail(
    token_ids: tl.tensor,
    stride: tl.tensor,
    lengths: tl.tensor,
    request: tl.tensor,
    LAYOUT: tl.constexpr,
) -> tl.tensor:
    """int32 [CONTEXT_LANES], the end of a text, the newest token first, -1 before the first."""
    place = tl.arange(0, LAYOUT.CONTEXT_LANES)
    position = tl.load(lengths + request).to(tl.int64) - 1 - place
    mask = (place < LAYOUT.REACH) & (position >= 0)
    return tl.load(token_ids + request * stride + position, mask=mask, other=-1)


@triton.jit
def absorb(hashed: tl.tensor, token: tl.tensor) -> tl.tensor:
    """uint64, the hash of a context that is one older token longer; that of none is 0."""
    hashed = (hashed ^ (token.to(tl.uint64) + 1)) * _MIX
    return hashed ^ (hashed >> 32)


@triton.jit
def address_of(
    hashed: tl.tensor,
    newest_token: tl.tensor,
    salt: tl.tensor,
    INDEX: tl.constexpr,
    OWN: tl.constexpr,
    LAYOUT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Address, int64, and head without steadiness, int32, of the entry of a context.

    Args:
        hashed: uint64, of the tokens of the context.
        newest_token: the first of them.
        salt: of the sequence, of any integer type; the entry carries it if it is its own, else 0.
        INDEX: of the length of the context, among `CONTEXTS`.

    """
    LENGTH: tl.constexpr = LAYOUT.CONTEXTS[INDEX]
    if LENGTH == 1 and not OWN:
        return newest_token.to(tl.int64), newest_token.to(tl.int32) << 3
    else:
        key = hashed + LENGTH
        if OWN and LAYOUT.PARTS == 1:
            key += salt.to(tl.uint64) * _FINISH
        key = key * _FINISH
        key = (key ^ (key >> 29)) * _MIX
        head = ((key >> _TAG_SHIFT) << 3).to(tl.int32) | (OWN << 2)
        address = LAYOUT.VOCAB + (key & (LAYOUT.SLOTS // LAYOUT.PARTS - 1)).to(tl.int64)
        if LAYOUT.PARTS > 1:
            address += (salt & (LAYOUT.PARTS - 1)).to(tl.int64) * (LAYOUT.SLOTS // LAYOUT.PARTS)
        return address, head


@triton.jit
def shares(salt: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Which lanes of `mask` are of a sequence that reads and writes what is shared."""
    return mask & (salt + tl.zeros(mask.shape, tl.int64) < _PRIVATE_SALT)


@triton.jit
def is_written(
    table: tl.tensor,
    address: tl.tensor,
    head: tl.tensor,
    salt: tl.tensor,
    mask: tl.tensor,
    K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Whether the entry there has this head and salt; and the head that is there."""
    entry = table + address * (2 + K)
    old_head = tl.load(entry, mask=mask, other=-1)
    old_salt = tl.load(entry + (1 + K), mask=mask, other=-1)
    return mask & ((old_head >> 2) == (head >> 2)) & (old_salt == salt), old_head


@triton.jit
def find_longest(
    table: tl.tensor,
    context: tl.tensor,
    salt: tl.tensor,
    mask: tl.tensor,
    LAYOUT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The known entries of the longest context that is known.

    No load of a token waits for another, nor of an entry: two latencies of memory in all.

    Args:
        table: int32 [addresses, 2 + k].
        context: pointers [lanes] to the newest tokens, behind each of which the older ones lie, as
            many as the longest of `CONTEXTS`.
        salt: of each lane's sequence.
        mask: [lanes], whether a lane has a context; the others find nothing.

    Returns:
        Of the shared entry, and then of the own one, address, int64 [lanes], -1 for none; and cell,
        int32 [lanes]: where its first successor is among [contexts, 2, k, 4], its next ones each 4
        behind.

    """
    hashed = tl.zeros(mask.shape, tl.uint64)
    shared = tl.full(mask.shape, -1, tl.int64)
    shared_cell = tl.zeros(mask.shape, tl.int32)
    own = tl.full(mask.shape, -1, tl.int64)
    own_cell = tl.zeros(mask.shape, tl.int32)
    newest_token = tl.load(context, mask=mask, other=-1)
    salt = salt.to(tl.int64)
    has_context = mask
    for index in tl.static_range(len(LAYOUT.CONTEXTS)):
        for place in tl.static_range(
            first_place(LAYOUT.CONTEXTS, index), end_place(LAYOUT.CONTEXTS, index)
        ):
            token = tl.load(context + place, mask=mask, other=-1)
            has_context = has_context & (token >= 0) & (token < LAYOUT.VOCAB)
            hashed = absorb(hashed, token)
        if LAYOUT.HAS_SHARED:
            address, head = address_of(hashed, newest_token, salt, index, 0, LAYOUT)
            may_share = shares(salt, has_context)
            is_found, old_head = is_written(table, address, head, salt * 0, may_share, LAYOUT.K)
            shared = tl.where(is_found, address, shared)
            shared_cell = tl.where(is_found, index * 8 * LAYOUT.K + (old_head & 3), shared_cell)
            own = tl.where(is_found, -1, own)
        if LAYOUT.HAS_OWN:
            address, head = address_of(hashed, newest_token, salt, index, 1, LAYOUT)
            is_found, old_head = is_written(table, address, head, salt, has_context, LAYOUT.K)
            own = tl.where(is_found, address, own)
            own_cell = tl.where(is_found, (index * 2 + 1) * 4 * LAYOUT.K + (old_head & 3), own_cell)
            # A shared one of a shorter context is passed.
            shared = tl.where(is_found & (shared_cell < index * 8 * LAYOUT.K), -1, shared)
    return shared, shared_cell, own, own_cell


@triton.jit
def bounded(chance: tl.tensor) -> tl.tensor:
    """See `core.grow.bounded`."""
    return tl.where(chance > 0, tl.minimum(chance, 1.0), 0.0)


@triton.jit
def find_entry(
    table: tl.tensor,
    rates: tl.tensor,
    context: tl.tensor,
    salt: tl.tensor,
    mask: tl.tensor,
    LAYOUT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The entry to draft from: of the longest context that is known the surer one, else the own.

    Args:
        table, context, salt, mask: see `find_longest`.
        rates: float32 [contexts, 2, k, 4], of the class of the sequence.

    Returns:
        Address and cell, as `find_longest` has them.

    """
    shared, shared_cell, own, own_cell = find_longest(table, context, salt, mask, LAYOUT)
    if LAYOUT.HAS_OWN and LAYOUT.HAS_SHARED:
        has_both = (shared >= 0) & (own >= 0)
        shared_rate = bounded(tl.load(rates + shared_cell, mask=has_both, other=0.0))
        own_rate = bounded(tl.load(rates + own_cell, mask=has_both, other=0.0))
        is_own = (shared < 0) | (has_both & (shared_rate <= own_rate))
        return tl.where(is_own, own, shared), tl.where(is_own, own_cell, shared_cell)
    elif LAYOUT.HAS_OWN:
        return own, own_cell
    else:
        return shared, shared_cell
