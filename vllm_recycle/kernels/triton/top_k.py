"""The most probable tokens of logits, in two launches: the twin of `core.learn.top_k`.

A row's logits are cut into groups of neighbours. The first launch streams through them and keeps
the maximum of each group. The k groups with the greatest maxima (of equal ones the first) hold the
k greatest logits (of equal ones the first): each of these groups offers one logit that comes before
all of any other group. So the second launch looks for the k best among the maxima, and then among
the logits of k groups: two thousand numbers a row, not a vocabulary.

Nothing on the host waits for it, so that it can be captured into a graph. Every rank computes the
same.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

# Logits that one program of the first launch looks at.
CHUNK = 8192


def top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """See `vllm_recycle.core.learn.top_k`; the first of its results.

    Of equal logits the lower token comes first, and NaN counts as -inf.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    group = group_size(vocab_size, k)
    num_groups = triton.cdiv(vocab_size, group)
    chunk = max(group, min(CHUNK, triton.next_power_of_2(vocab_size)))
    maxima = torch.empty(num_rows, num_groups, dtype=torch.float32, device=logits.device)
    _group_maxima_kernel[(num_rows, triton.cdiv(vocab_size, chunk))](
        maxima,
        logits,
        logits.stride(0),
        VOCAB=vocab_size,
        GROUPS=chunk // group,
        GROUP=group,
        num_warps=8,
    )
    # A power of two, and two at least: `tl.topk` of one is not to be had in every Triton.
    num_kept = max(2, triton.next_power_of_2(k))
    token_ids = torch.empty(num_rows, k, dtype=torch.int32, device=logits.device)
    _top_k_kernel[(num_rows,)](
        token_ids,
        maxima,
        logits,
        logits.stride(0),
        VOCAB=vocab_size,
        GROUPS=max(num_kept, triton.next_power_of_2(num_groups)),
        GROUP=group,
        K=k,
        KEPT=num_kept,
        num_warps=8,
    )
    return token_ids


def group_size(vocab_size: int, k: int) -> int:
    """Logits of a group, a power of two: about as many groups as logits of the k best groups.

    At least 8, which a thread loads at once.
    """
    return 1 << max(3, round(math.log2(vocab_size / k) / 2))


@triton.jit
def _group_maxima_kernel(
    maxima: tl.tensor,
    logits: tl.tensor,
    row_stride: int,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """A program per row and `GROUPS` of its groups."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    group = chunk * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = logits + row.to(tl.int64) * row_stride + column
    # A mask at a place that is no multiple of a vector would cost all loads their width.
    if (chunk + 1) * (GROUPS * GROUP) <= VOCAB:
        value = tl.load(values)
    else:
        value = tl.load(values, mask=column < VOCAB, other=float("-inf"))
    # `tl.max` passes over NaN where there is anything else.
    maximum = tl.max(value, axis=1)
    num_groups = (VOCAB + GROUP - 1) // GROUP
    tl.store(maxima + row.to(tl.int64) * num_groups + group, maximum, mask=group < num_groups)


@triton.jit
def _top_k_kernel(
    token_ids: tl.tensor,
    maxima: tl.tensor,
    logits: tl.tensor,
    row_stride: int,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    KEPT: tl.constexpr,
) -> None:
    """A program per row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    num_groups = (VOCAB + GROUP - 1) // GROUP
    mask = group < num_groups
    maximum = tl.load(maxima + row * num_groups + group, mask=mask, other=0.0)
    best_group = _best(maximum, group, mask, KEPT)
    column = best_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # Where there are fewer groups than k, the places left over have ids beyond the last.
    mask = column < VOCAB
    value = tl.load(logits + row * row_stride + column, mask=mask, other=0.0)
    N: tl.constexpr = KEPT * GROUP
    tokens = _best(tl.reshape(value, [N]), tl.reshape(column, [N]), tl.reshape(mask, [N]), KEPT)
    rank = tl.arange(0, KEPT)
    tl.store(token_ids + row * K + rank, tokens, mask=rank < K)


@triton.jit
def _best(value: tl.tensor, ids: tl.tensor, mask: tl.tensor, KEPT: tl.constexpr) -> tl.tensor:
    """int32 [KEPT], the ids of the greatest values, of equal ones the lowest id first."""
    # NaN counts as -inf, and adding 0.0 makes one zero of two. Then the bits order as the floats
    # do, -inf above INT_MIN, and with the id below them no two numbers are equal.
    # Why `tl.topk`: of 1,024 numbers, compiled for 8 warps, it is 830 instructions and 7 barriers
    # for k = 8, 1,240 and 13 for k = 64. Rounds of an argmax are 350 and 32, 2,800 and 256; here
    # it is the barriers that are waited for.
    value = value.to(tl.float32)
    value = tl.where(value == value, value, float("-inf")) + 0.0
    bits = value.to(tl.int32, bitcast=True)
    ordered_bits = tl.where(mask, bits ^ ((bits >> 31) & 0x7FFFFFFF), -(2**31))
    key = (ordered_bits.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    best_keys = tl.topk(key, KEPT)
    return 0x7FFFFFFF - (best_keys & 0x7FFFFFFF).to(tl.int32)
