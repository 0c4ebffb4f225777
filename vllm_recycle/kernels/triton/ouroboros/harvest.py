"""Triton kernel of the harvest: phrases from what the target verified, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_recycle.core.draft_shape import DraftShape
from vllm_recycle.core.harvest import Phrases


def harvest(
    row_token_ids: torch.Tensor,
    sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    *,
    shape: DraftShape,
) -> tuple[Phrases, Phrases]:
    """See `vllm_recycle.core.harvest.harvest`."""
    batch, length = len(cu_num_logits) - 1, shape.length
    num_runs, branches = shape.num_runs, shape.branches
    make = row_token_ids.new_empty
    trunk_phrases = Phrases(make(batch, num_runs), make(batch, num_runs, length))
    branch_phrases = Phrases(
        make(batch, branches), make(batch, branches, length), make(batch, branches, length)
    )
    if batch and num_runs + branches:
        _harvest_kernel[(batch,)](
            trunk_phrases.owners,
            trunk_phrases.phrases,
            branch_phrases.owners,
            branch_phrases.phrases,
            branch_phrases.replaced,
            row_token_ids.contiguous(),
            sampled.contiguous(),
            cu_num_logits,
            GAMMA=shape.gamma,
            LENGTH=length,
            RUNS=num_runs,
            TRIED=branches,
            ROWS=triton.next_power_of_2(shape.gamma),
            RUN_LANES=triton.next_power_of_2(max(1, num_runs)),
            TRIED_LANES=triton.next_power_of_2(max(1, branches)),
            TOKENS=triton.next_power_of_2(length),
            num_warps=1,
        )
    return trunk_phrases, branch_phrases


@triton.jit
def _harvest_kernel(
    run_owners: tl.tensor,
    runs: tl.tensor,
    tried_owners: tl.tensor,
    corrected: tl.tensor,
    replaced: tl.tensor,
    row_token_ids: tl.tensor,
    sampled: tl.tensor,
    cu_num_logits: tl.tensor,
    GAMMA: tl.constexpr,
    LENGTH: tl.constexpr,
    RUNS: tl.constexpr,
    TRIED: tl.constexpr,
    ROWS: tl.constexpr,
    RUN_LANES: tl.constexpr,
    TRIED_LANES: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """A program a request."""
    request = tl.program_id(0).to(tl.int64)
    first_row = tl.load(cu_num_logits + request).to(tl.int64)
    rows = tl.load(cu_num_logits + request + 1).to(tl.int64) - first_row
    drafts, sampled = row_token_ids + first_row, sampled + first_row
    column = tl.arange(0, TOKENS)[None, :]

    if RUNS > 0:
        run = tl.arange(0, RUN_LANES)
        row = run[:, None] + column
        is_run = (run < RUNS)[:, None] & (column < LENGTH)
        sample = tl.load(sampled + row, mask=is_run & (row < rows), other=-1)
        # What the draft has behind each row but the last one of a run.
        draft_mask = is_run & (column < LENGTH - 1) & (row + 1 < rows)
        draft_token = tl.load(drafts + row + 1, mask=draft_mask, other=-1)
        differs = tl.max((draft_mask & (draft_token != sample)).to(tl.int32), axis=1)
        owner = tl.load(drafts + run, mask=(run < RUNS) & (run + LENGTH <= rows), other=-1)
        owner = tl.where(differs > 0, -1, owner)
        tl.store(run_owners + request * RUNS + run, owner, mask=run < RUNS)
        tl.store(runs + (request * RUNS + run[:, None]) * LENGTH + column, sample, mask=is_run)

    if TRIED > 0:
        # How far the target goes along with the trunk.
        row = tl.arange(0, ROWS)
        is_row = (row < GAMMA) & (row + 1 < rows)
        draft_token = tl.load(drafts + row + 1, mask=is_row, other=-1)
        sample = tl.load(sampled + row, mask=is_row, other=-1)
        num_accepted = tl.min(tl.where(is_row & (draft_token != sample), row, GAMMA), axis=0)

        lane = tl.arange(0, TRIED_LANES)
        is_lane = lane < TRIED
        # The newest first, as they were proposed; inserted last, it stays the newest.
        branch = TRIED - 1 - lane
        row = GAMMA + 1 + branch[:, None] * LENGTH + column
        is_tried = is_lane[:, None] & (column < LENGTH)
        draft_mask = is_tried & (row < rows)
        tried_token = tl.load(drafts + row, mask=draft_mask, other=-1)
        parent_row = tl.where(column == 0, GAMMA, row - 1)
        sample = tl.load(sampled + parent_row, mask=is_tried & (parent_row < rows), other=-1)
        lacks = tl.max((is_tried & (tried_token < 0)).to(tl.int32), axis=1)
        owner = tl.load(drafts + GAMMA, mask=rows > GAMMA, other=-1)
        owner = tl.where((lacks > 0) | (num_accepted < GAMMA), -1, owner)
        offset = (request * TRIED + lane[:, None]) * LENGTH + column
        tl.store(tried_owners + request * TRIED + lane, owner, mask=is_lane)
        tl.store(corrected + offset, sample, mask=is_tried)
        tl.store(replaced + offset, tried_token, mask=is_tried)
