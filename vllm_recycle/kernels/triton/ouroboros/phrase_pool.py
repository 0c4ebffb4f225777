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
    phrases = torch.empty(shape, dtype=torch.int64, device=table.device)
    if phrases.numel():
        _newest_phrases_kernel[(token_ids.numel(),)](
            phrases,
            table,
            token_ids.contiguous(),
            COUNT=count,
            PER_TOKEN=per_token,
            LENGTH=length,
            PLACES=triton.next_power_of_2(count),
            TOKENS=triton.next_power_of_2(length),
            num_warps=1,
        )
    return phrases


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
    output: tl.tensor,
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
    mask = (place < COUNT) & (column < LENGTH)
    offset = (token * PER_TOKEN + PER_TOKEN - 1 - place) * LENGTH + column
    # Of no token there are none. A limit, since a mask is no number and a tensor at once.
    count = tl.where(token >= 0, COUNT, 0)
    phrase = tl.load(table + offset, mask=mask & (place < count), other=-1)
    tl.store(output + (index * COUNT + place) * LENGTH + column, phrase.to(tl.int64), mask=mask)


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
    first_index = num_phrases - 1 - tl.program_id(0)
    token = tl.load(token_ids + first_index).to(tl.int64)
    if token < 0:
        return
    is_earlier = tl.zeros([PHRASES], tl.int32)
    for start in range(0, first_index, PHRASES):
        indices = start + tl.arange(0, PHRASES)
        other_token = tl.load(token_ids + indices, mask=indices < first_index, other=-1)
        is_earlier |= (other_token == token).to(tl.int32)
    if tl.max(is_earlier, axis=0) > 0:
        return

    place, column = tl.arange(0, PLACES), tl.arange(0, TOKENS)
    token_phrases = table + token * (PER_TOKEN * LENGTH)
    is_place, is_column = place < PER_TOKEN, column < LENGTH
    offset = place[:, None] * LENGTH + column[None, :]
    mask = is_place[:, None] & is_column[None, :]
    pool = tl.load(token_phrases + offset, mask=mask, other=0)
    # Nothing moves before all is known. Till then a phrase has an age, no two the same, the older
    # the lower; a place without a phrase is older than any phrase.
    age = place
    # All that is replaced goes before anything comes.
    for inserts in tl.static_range(1 if replaced is None else 0, 2):
        for start in range(first_index, num_phrases, PHRASES):
            indices = start + tl.arange(0, PHRASES)
            other_token = tl.load(token_ids + indices, mask=indices < num_phrases, other=-1)
            is_left = (other_token == token).to(tl.int32)
            for _ in range(tl.sum(is_left, axis=0)):
                index = tl.min(tl.where(is_left > 0, indices, num_phrases), axis=0)
                is_left = tl.where(indices == index, 0, is_left)
                phrase = tl.load(phrases + index * LENGTH + column, mask=is_column, other=0)
                is_phrase = tl.min(phrase, axis=0) >= 0
                if inserts:
                    # In the place of one that is equal, else of the oldest.
                    is_equal = tl.min((pool == phrase[None, :]).to(tl.int32), axis=1) > 0
                    rank = tl.where(is_place, tl.where(is_equal, -(2**31), age), 2**31 - 1)
                    takes = (rank == tl.min(rank, axis=0)) & is_phrase
                    pool = tl.where(takes[:, None], phrase[None, :].to(tl.int32), pool)
                    age = tl.where(takes, PER_TOKEN + index, age)
                else:
                    victim = tl.load(replaced + index * LENGTH + column, mask=is_column, other=0)
                    is_victim = tl.min((pool == victim[None, :]).to(tl.int32), axis=1) > 0
                    pool = tl.where((is_victim & is_phrase)[:, None], -1, pool)
                    age = tl.where(is_victim & is_phrase, age - PLACES, age)

    is_newer = (age[None, :] > age[:, None]) & is_place[None, :]
    place = PER_TOKEN - 1 - tl.sum(is_newer.to(tl.int32), axis=1)
    tl.debug_barrier()  # Other threads have read the places that a thread overwrites.
    tl.store(token_phrases + place[:, None] * LENGTH + column[None, :], pool, mask=mask)
