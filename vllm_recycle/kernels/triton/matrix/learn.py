"""What a step teaches the adjacency matrix, in two launches: the twin of `core.learn.learn`.

All rows of a step learn at once. What is counted, and whether an entry is steady, goes by what the
table had before the step. Of all rows that write one entry the last alone does: requests count in
order, and the visited rows of a request come after its others.

The first launch counts at the visited rows, finds the addresses of all rows, and leaves in `stamps`
the number of the last writer of each address. The second one lets the writers whose number is there
write, and takes the stamps away again. It also folds what was counted into the table of counts.
Stamps and counts are integers, so that nothing depends on which program comes first: every rank
computes the same. There is no word to the host, so that this can be part of a captured graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_recycle.core.adjacency import MAX_STEADINESS, NUM_COUNTED, AdjacencyMatrix
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.kernels.triton.matrix.count import DeviceCounts, count_visits, fold_counts
from vllm_recycle.kernels.triton.matrix.find import Layout, Texts, is_written, read_tail
from vllm_recycle.kernels.triton.matrix.mark import mark_entries

_MAX_STEADINESS = tl.constexpr(MAX_STEADINESS)
_NUM_COUNTED = tl.constexpr(NUM_COUNTED)

LANES = 32  # rows, or places of a path, or ranks, of one program
ELEMENTS = 512  # of the entries that one program writes


def learn(
    matrix: AdjacencyMatrix,
    stamps: torch.Tensor,
    counts: DeviceCounts | None,
    texts: Texts,
    step: VerifiedStep,
    *,
    max_rows: int,
    learns: torch.Tensor | None = None,
) -> None:
    """See `core.learn.learn`.

    Args:
        matrix: written in place.
        stamps: int32 [addresses], zero before and after.
        counts: written in place; None to count nothing.
        texts: by `req_state_idx`; each ends with the root of the step.
        step: what is learnt from; a request may have no rows.
        max_rows: at least the rows of any request; grids are made from it.
        learns: bool or integer [batch], whether a request teaches anything; None if all do.

    """
    table, layout, walked = matrix.table, matrix.layout, step.walked
    batch, path = walked.path.shape
    tensors = (table, stamps, matrix.salts, matrix.classes, step.parents, step.row_token_ids)
    step_tensors = (step.successors, step.cu_num_logits, walked.path, walked.token_ids)
    for tensor in (*tensors, *step_tensors):
        assert tensor.is_contiguous()
    assert texts.token_ids.stride(1) == 1
    row_inputs = (step.idx_mapping.contiguous(), matrix.salts, step.cu_num_logits)
    rows = batch * max_rows
    kinds = 2 * len(layout.contexts)
    numbers = torch.empty(rows, dtype=torch.int32, device=table.device)
    heads = torch.empty(kinds, rows, dtype=torch.int32, device=table.device)
    addresses = torch.empty(kinds, rows, dtype=torch.int64, device=table.device)
    text = torch.empty(batch, path + layout.reach, dtype=torch.int64, device=table.device)
    row_blocks = triton.cdiv(max_rows, LANES)
    path_blocks = triton.cdiv(path, LANES) if counts is not None else 0
    _mark_step_kernel[(batch, row_blocks + path_blocks)](
        numbers,
        heads,
        addresses,
        text,
        stamps,
        counts.increments if counts is not None else None,
        table,
        *row_inputs,
        matrix.classes,
        learns,
        texts.token_ids,
        texts.token_ids.stride(0),
        texts.lengths,
        step.parents,
        step.row_token_ids,
        walked.path,
        walked.token_ids,
        MAX_ROWS=max_rows,
        TREE_ROWS=step.parents.shape[1],
        PATH=path,
        PATH_LANES=triton.next_power_of_2(path),
        LANES=LANES,
        LAYOUT=Layout.of(layout),
        num_warps=1,
    )
    width = triton.next_power_of_2(layout.width)
    block = max(1, ELEMENTS // width)
    ranks = NUM_COUNTED * kinds * layout.k
    fold_blocks = triton.cdiv(ranks, LANES) if counts is not None else 0
    # A kind of entry is a length of context and whether it is an own one; first the shared one.
    num_written = len(layout.contexts) * (layout.has_own + layout.has_shared)
    _write_step_kernel[(fold_blocks + triton.cdiv(rows, block) * num_written,)](
        table,
        stamps,
        counts.counts if counts is not None else None,
        counts.rates if counts is not None else None,
        counts.increments if counts is not None else None,
        numbers,
        heads,
        addresses,
        *row_inputs,
        step.successors,
        rows,
        MAX_ROWS=max_rows,
        K=layout.k,
        WIDTH=width,
        ROWS=block,
        KINDS=kinds,
        WRITTEN=num_written,
        FIRST_KIND=0 if layout.has_shared else 1,
        KIND_STEP=2 * len(layout.contexts) // num_written,
        ALL_RANKS=ranks,
        FOLD_BLOCKS=fold_blocks,
        LANES=LANES,
        num_warps=1,
    )


@triton.jit
def _mark_step_kernel(
    numbers: tl.tensor,
    heads: tl.tensor,
    addresses: tl.tensor,
    text: tl.tensor,
    stamps: tl.tensor,
    increments: tl.tensor,
    table: tl.tensor,
    idx_mapping: tl.tensor,
    salts: tl.tensor,
    cu_num_logits: tl.tensor,
    classes: tl.tensor,
    learns: tl.tensor,
    all_token_ids: tl.tensor,
    all_token_ids_stride: int,
    lengths: tl.tensor,
    parents: tl.tensor,
    row_token_ids: tl.tensor,
    path: tl.tensor,
    token_ids: tl.tensor,
    MAX_ROWS: tl.constexpr,
    TREE_ROWS: tl.constexpr,
    PATH: tl.constexpr,
    PATH_LANES: tl.constexpr,
    LANES: tl.constexpr,
    LAYOUT: tl.constexpr,
) -> None:
    """A program per request and `LANES` of its rows, or so many places of its path to count at."""
    ROW_BLOCKS: tl.constexpr = (MAX_ROWS + LANES - 1) // LANES
    index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = tl.load(idx_mapping + index).to(tl.int64)
    salt = tl.load(salts + request)
    start = tl.load(cu_num_logits + index).to(tl.int64)
    num_rows = (tl.load(cu_num_logits + index + 1) - start).to(tl.int32)
    if learns is not None:
        num_rows = tl.where(tl.load(learns + index) != 0, num_rows, 0)
    tail = read_tail(all_token_ids, all_token_ids_stride, lengths, request, LAYOUT)
    path += index * PATH
    token_ids += index * PATH

    if block < ROW_BLOCKS:
        mark_entries(
            numbers,
            heads,
            addresses,
            stamps,
            block * LANES + tl.arange(0, LANES),
            salt,
            start,
            num_rows,
            tail,
            parents + request * TREE_ROWS,
            row_token_ids + start,
            path,
            MAX_ROWS,
            PATH,
            LAYOUT,
        )
    elif increments is not None:
        request_class = tl.load(classes + request)
        num_rows = tl.where(request_class < _NUM_COUNTED, num_rows, 0)
        count_visits(
            increments + request_class * (LAYOUT.RANKS * 8),
            text + index * (PATH + LAYOUT.REACH),
            tail,
            path,
            token_ids,
            (block - ROW_BLOCKS) * LANES + tl.arange(0, LANES),
            num_rows,
            table,
            salt,
            PATH,
            PATH_LANES,
            LAYOUT,
        )


@triton.jit(do_not_specialize=["rows"])
def _write_step_kernel(
    table: tl.tensor,
    stamps: tl.tensor,
    counts: tl.tensor,
    rates: tl.tensor,
    increments: tl.tensor,
    numbers: tl.tensor,
    heads: tl.tensor,
    addresses: tl.tensor,
    idx_mapping: tl.tensor,
    salts: tl.tensor,
    cu_num_logits: tl.tensor,
    successors: tl.tensor,
    rows: int,
    MAX_ROWS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KINDS: tl.constexpr,
    WRITTEN: tl.constexpr,
    FIRST_KIND: tl.constexpr,
    KIND_STEP: tl.constexpr,
    ALL_RANKS: tl.constexpr,
    FOLD_BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """A program per kind of entry of `ROWS` rows, or per `LANES` ranks of the counts."""
    program = tl.program_id(0)
    if program >= FOLD_BLOCKS:
        program -= FOLD_BLOCKS
        kind = FIRST_KIND + program % WRITTEN * KIND_STEP
        row = (program // WRITTEN * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        number = tl.load(numbers + row, mask=row < rows, other=0)
        address = tl.load(addresses + kind.to(tl.int64) * rows + row, mask=number > 0, other=-1)
        head = tl.load(heads + kind.to(tl.int64) * rows + row, mask=number > 0, other=0)
        stamp = tl.load(stamps + address, mask=address >= 0, other=0)
        is_last = (address >= 0) & (stamp == number * KINDS + kind)
        request = row // MAX_ROWS
        salt = tl.load(salts + tl.load(idx_mapping + request, mask=is_last, other=0), mask=is_last)
        salt = tl.where(kind % 2 == 1, salt, 0)
        source = tl.load(cu_num_logits + request, mask=is_last, other=0) + row % MAX_ROWS
        top_token = tl.load(successors + source * K, mask=is_last, other=-1)
        is_found, old_head = is_written(table, address, head, salt, is_last, K)
        is_steady = is_found & (
            tl.load(table + address * (2 + K) + 1, mask=is_found, other=-1) == top_token
        )
        head |= tl.where(is_steady, tl.minimum(_MAX_STEADINESS, (old_head & 3) + 1), 0)
        column = tl.arange(0, WIDTH)[None, :]
        is_successor = (column > 0) & (column <= K)
        value = tl.load(
            successors + source[:, None] * K + column - 1,
            mask=is_last[:, None] & is_successor,
            other=0,
        )
        value = tl.where(column == 0, head[:, None], value)
        value = tl.where(column > K, salt[:, None].to(tl.int32), value)
        # All of a program's threads have read before one of them writes.
        tl.debug_barrier()
        tl.store(stamps + address, 0, mask=is_last)
        tl.store(
            table + address[:, None] * (2 + K) + column,
            value,
            mask=is_last[:, None] & (column < 2 + K),
        )
    elif counts is not None:
        fold_counts(counts, rates, increments, program * LANES, ALL_RANKS, LANES)
