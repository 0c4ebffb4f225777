"""Triton kernels of the phrase pool: inserting a batch, and looking phrases up.

Twins of the functions of `core.phrase_pool`, which say what is computed, in one launch each.
Phrases of one token are inserted by one program, one after the other; of different tokens side by
side. A batch has some hundred phrases, so that looking for those of a token needs no order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Phrases that a program looks at at a time for those of its token.
PHRASES = 32


def newest_phrases(table: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
    """See `vllm_recycle.core.phrase_pool.newest_phrases`."""
    _, per_token, length = table.shape
    assert table.is_contiguous()
    shape = (*token_ids.shape, count, length)
    newest = torch.empty(shape, dtype=torch.int64, device=table.device)
    if newest.numel():
        _newest_phrases_kernel[(token_ids.numel(),)](
            newest,
            table,
            token_ids.contiguous(),
            COUNT=count,
            PER_TOKEN=per_token,
            LENGTH=length,
            PLACES=triton.next_power_of_2(count),
            TOKENS=triton.next_power_of_2(length),
            num_warps=1,
        )
    return newest


def insert_phrases(
    table: torch.Tensor,
    token_ids: torch.Tensor,
    phrases: torch.Tensor,
    *,
    replaced: torch.Tensor | None = None,
) -> None:
    """See `vllm_recycle.core.phrase_pool.insert_phrases`."""
    _, per_token, length = table.shape
    num_phrases = len(token_ids)
    assert table.is_contiguous()
    if num_phrases:
        _insert_phrases_kernel[(num_phrases,)](
            table,
            token_ids.contiguous(),
            phrases.contiguous(),
            None if replaced is None else replaced.contiguous(),
            num_phrases,
            PER_TOKEN=per_token,
            LENGTH=length,
            PLACES=triton.next_power_of_2(per_token),
            TOKENS=triton.next_power_of_2(length),
            PHRASES=PHRASES,
            num_warps=1,
        )


@triton.jit
def _newest_phrases_kernel(
    newest: tl.tensor,
    table: tl.tensor,
    token_ids: tl.tensor,
    COUNT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    LENGTH: tl.constexpr,
    PLACES: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """A program a token."""
    index = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids + index).to(tl.int64)
    place, column = tl.arange(0, PLACES)[:, None], tl.arange(0, TOKENS)[None, :]
    real = (place < COUNT) & (column < LENGTH)
    at = (token * PER_TOKEN + PER_TOKEN - 1 - place) * LENGTH + column
    # Of no token there are none. A limit, since a mask is no number and a tensor at once.
    count = tl.where(token >= 0, COUNT, 0)
    phrase = tl.load(table + at, mask=real & (place < count), other=-1)
    tl.store(newest + (index * COUNT + place) * LENGTH + column, phrase.to(tl.int64), mask=real)


@triton.jit(do_not_specialize=["num_phrases"])
def _insert_phrases_kernel(
    table: tl.tensor,
    token_ids: tl.tensor,
    phrases: tl.tensor,
    replaced: tl.tensor | None,
    num_phrases: int,
    PER_TOKEN: tl.constexpr,
    LENGTH: tl.constexpr,
    PLACES: tl.constexpr,
    TOKENS: tl.constexpr,
    PHRASES: tl.constexpr,
) -> None:
    """A program a phrase; that of a token's first one inserts all of the token's."""
    # The last phrase first: where programs run one by one, what inserts and should not is not
    # hidden.
    first = num_phrases - 1 - tl.program_id(0)
    token = tl.load(token_ids + first).to(tl.int64)
    if token < 0:
        return
    earlier = tl.zeros([PHRASES], tl.int32)
    for start in range(0, first, PHRASES):
        index = start + tl.arange(0, PHRASES)
        other = tl.load(token_ids + index, mask=index < first, other=-1)
        earlier |= (other == token).to(tl.int32)
    if tl.max(earlier, axis=0) > 0:
        return

    place, column = tl.arange(0, PLACES), tl.arange(0, TOKENS)
    own = table + token * (PER_TOKEN * LENGTH)
    is_place, is_column = place < PER_TOKEN, column < LENGTH
    at = place[:, None] * LENGTH + column[None, :]
    is_here = is_place[:, None] & is_column[None, :]
    known = tl.load(own + at, mask=is_here, other=0)
    # Nothing moves before all is known. Till then a phrase has an age, no two the same, the older
    # the lower; a place without a phrase is older than any phrase.
    age = place
    # All that is replaced goes before anything comes.
    for inserts in tl.static_range(1 if replaced is None else 0, 2):
        for start in range(first, num_phrases, PHRASES):
            index = start + tl.arange(0, PHRASES)
            other = tl.load(token_ids + index, mask=index < num_phrases, other=-1)
            is_left = (other == token).to(tl.int32)
            for _ in range(tl.sum(is_left, axis=0)):
                one = tl.min(tl.where(is_left > 0, index, num_phrases), axis=0)
                is_left = tl.where(index == one, 0, is_left)
                phrase = tl.load(phrases + one * LENGTH + column, mask=is_column, other=0)
                is_phrase = tl.min(phrase, axis=0) >= 0
                if inserts:
                    # In the place of one that is equal, else of the oldest.
                    is_equal = tl.min((known == phrase[None, :]).to(tl.int32), axis=1) > 0
                    rank = tl.where(is_place, tl.where(is_equal, -(2**31), age), 2**31 - 1)
                    takes = (rank == tl.min(rank, axis=0)) & is_phrase
                    known = tl.where(takes[:, None], phrase[None, :].to(tl.int32), known)
                    age = tl.where(takes, PER_TOKEN + one, age)
                else:
                    old = tl.load(replaced + one * LENGTH + column, mask=is_column, other=0)
                    is_old = tl.min((known == old[None, :]).to(tl.int32), axis=1) > 0
                    known = tl.where((is_old & is_phrase)[:, None], -1, known)
                    age = tl.where(is_old & is_phrase, age - PLACES, age)

    is_newer = (age[None, :] > age[:, None]) & is_place[None, :]
    place = PER_TOKEN - 1 - tl.sum(is_newer.to(tl.int32), axis=1)
    tl.debug_barrier()  # Other threads have read the places that a thread overwrites.
    tl.store(own + place[:, None] * LENGTH + column[None, :], known, mask=is_here)
