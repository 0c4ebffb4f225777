"""The most probable tokens of logits, in two launches: the twin of `core.learn.top_k`.

A row's logits are cut into groups of neighbours. The first launch streams through them and keeps
the maximum of each group. The k groups with the greatest maxima (of equal ones the first) hold the
k greatest logits (of equal ones the first): each of these groups offers one logit that comes before
all of any other group. So the second launch looks for the k best among the maxima, and then among
the logits of k groups: two thousand numbers a row, not a vocabulary.

There is no word to the host, so that this can be part of a captured graph. Every rank computes the
same.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

# Logits that one program of the first launch looks at.
CHUNK = 8192
# Rows after a row that its program looks at at a time.
LATER = 128


def top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """See `vllm_recycle.core.learn.top_k`.

    Of equal logits the lower token comes first, and NaN counts as -inf.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    best = torch.empty(len(logits), k, dtype=torch.int32, device=logits.device)
    maxima, sizes = _group_maxima(logits, k)
    _top_k_kernel[(len(logits),)](best, maxima, logits, logits.stride(0), **sizes, num_warps=8)
    return best


def _group_maxima(
    logits: torch.Tensor,
    k: int,
    expanded_idx_mapping: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, int]]:
    """The first launch.

    Args:
        logits: [rows, vocab], those of a row side by side.
        k: how many of the best will be looked for.
        expanded_idx_mapping: of the rows; None where all rows are asked for.
        token_ids: of the rows; the maxima of a row whose token its request has again are left out.

    Returns:
        float32 [rows, groups], and what kernels that look for the best are compiled with.

    """
    num_rows, vocab_size = logits.shape
    group = group_size(vocab_size, k)
    num_groups = triton.cdiv(vocab_size, group)
    chunk = max(group, min(CHUNK, triton.next_power_of_2(vocab_size)))
    maxima = torch.empty(num_rows, num_groups, dtype=torch.float32, device=logits.device)
    _group_maxima_kernel[(num_rows, triton.cdiv(vocab_size, chunk))](
        maxima,
        expanded_idx_mapping,
        token_ids,
        logits,
        logits.stride(0),
        num_rows,
        VOCAB=vocab_size,
        GROUPS=chunk // group,
        GROUP=group,
        LATER=LATER,
        num_warps=8,
    )
    # A power of two, and two at least: `tl.topk` of one is not to be had in every Triton.
    kept = max(2, triton.next_power_of_2(k))
    groups = max(kept, triton.next_power_of_2(num_groups))
    return maxima, {"VOCAB": vocab_size, "GROUPS": groups, "GROUP": group, "K": k, "KEPT": kept}


def group_size(vocab_size: int, k: int) -> int:
    """Logits of a group, a power of two: about as many groups as logits of the k best groups.

    At least 8, which a thread loads at once.
    """
    return 1 << max(3, round(math.log2(vocab_size / k) / 2))


@triton.jit(do_not_specialize=["num_rows"])
def _group_maxima_kernel(
    maxima: tl.tensor,
    expanded_idx_mapping: tl.tensor,
    token_ids: tl.tensor,
    logits: tl.tensor,
    row_stride: int,
    num_rows: int,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LATER: tl.constexpr,
) -> None:
    """A program for a row and `GROUPS` of its groups, unless it is plain that nobody asks."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if token_ids is not None:
        token = tl.load(token_ids + row)
        if token < 0:
            return
        # The rows of a request lie together, and a tree often has a token several times.
        later = row + 1 + tl.arange(0, LATER)
        same_token = tl.load(token_ids + later, mask=later < num_rows, other=-1) == token
        same_request = tl.load(expanded_idx_mapping + later, mask=same_token, other=-1) == tl.load(
            expanded_idx_mapping + row
        )
        if tl.max((same_token & same_request).to(tl.int32), axis=0) > 0:
            return
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
    best: tl.tensor,
    maxima: tl.tensor,
    logits: tl.tensor,
    row_stride: int,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    KEPT: tl.constexpr,
) -> None:
    """A program a row."""
    row = tl.program_id(0)
    rank = tl.arange(0, KEPT)
    tokens = _best_of_row(maxima, logits, row, row_stride, VOCAB, GROUPS, GROUP, KEPT)
    tl.store(best + row.to(tl.int64) * K + rank, tokens, mask=rank < K)


@triton.jit
def _best_of_row(
    maxima: tl.tensor,
    logits: tl.tensor,
    row: tl.tensor,
    row_stride: int,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    KEPT: tl.constexpr,
) -> tl.tensor:
    """int32 [KEPT], the most probable tokens of a row, best first."""
    group = tl.arange(0, GROUPS)
    num_groups = (VOCAB + GROUP - 1) // GROUP
    real = group < num_groups
    maximum = tl.load(maxima + row.to(tl.int64) * num_groups + group, mask=real, other=0.0)
    chosen = _best(maximum, group, real, KEPT)
    column = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # Where there are fewer groups than k, the places left over have ids beyond the last.
    real = column < VOCAB
    value = tl.load(logits + row.to(tl.int64) * row_stride + column, mask=real, other=0.0)
    N: tl.constexpr = KEPT * GROUP
    return _best(tl.reshape(value, [N]), tl.reshape(column, [N]), tl.reshape(real, [N]), KEPT)


@triton.jit
def _best(value: tl.tensor, ids: tl.tensor, real: tl.tensor, KEPT: tl.constexpr) -> tl.tensor:
    """int32 [KEPT], the ids of the greatest values, of equal ones the lowest id first."""
    # NaN counts as -inf, and adding 0.0 makes one zero of two. Then the bits order as the floats
    # do, -inf above INT_MIN, and with the id below them no two numbers are equal.
    # Why `tl.topk`: of 1,024 numbers, compiled for 8 warps, it is 830 instructions and 7 barriers
    # for k = 8, 1,240 and 13 for k = 64. Rounds of an argmax are 350 and 32, 2,800 and 256; here
    # it is the barriers that are waited for.
    value = value.to(tl.float32)
    value = tl.where(value == value, value, float("-inf")) + 0.0
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(real, bits ^ ((bits >> 31) & 0x7FFFFFFF), -(2**31))
    packed = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
    best = tl.topk(packed, KEPT)
    return 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
