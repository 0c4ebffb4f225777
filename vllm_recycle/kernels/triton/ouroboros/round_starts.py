"""Where a round of drafting begins: what a draft model's cache lacks of some texts, in one launch.

What it gives has tensors that never move, for CUDA graphs of whole rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl

NO_SLOT = -1  # vLLM's PAD_SLOT_ID


@dataclass(frozen=True, slots=True)
class RoundStart:
    """Where the requests of a round stand when it begins.

    Attributes:
        idx_mapping: int64 [batch].
        last_token_ids: int64 [batch].
        heads: int64 [batch, head], what the draft's cache lacks but for the last token, at the end
            of each row.
        num_head: int64 [batch], how many tokens these are, fewer than `head`.
        num_cached: int64 [batch], the tokens before them.
        block_table: int32 [batch, n], of which the blocks that hold all of these are set.
        slot_mapping: int64 [batch, head - 1], where these tokens are to be written when the last
            one stands behind them, -1 for nowhere.

    """

    idx_mapping: torch.Tensor
    last_token_ids: torch.Tensor
    heads: torch.Tensor
    num_head: torch.Tensor
    num_cached: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor

    @classmethod
    def make(cls, batch: int, head: int, num_blocks: int, device: torch.device) -> RoundStart:
        """See `clear`."""
        number = torch.empty(batch, dtype=torch.int64, device=device)
        start = cls(
            idx_mapping=number,
            last_token_ids=torch.empty_like(number),
            heads=number.new_empty(batch, head),
            num_head=torch.empty_like(number),
            num_cached=torch.empty_like(number),
            block_table=number.new_empty(batch, num_blocks, dtype=torch.int32),
            slot_mapping=number.new_empty(batch, head - 1),
        )
        start.clear()
        return start

    def clear(self) -> None:
        """Make it one of requests that are none: a round can be run, and writes no KV.

        What it teaches a proposer is nonsense.
        """
        for field in fields(self):
            getattr(self, field.name).zero_()
        self.num_head.fill_(1)
        self.slot_mapping.fill_(NO_SLOT)

    def first(self, batch: int) -> RoundStart:
        """Of the first requests; views."""
        return RoundStart(*(getattr(self, field.name)[:batch] for field in fields(self)))


def begin_round(
    start: RoundStart,
    idx_mapping: torch.Tensor,
    *,
    texts: torch.Tensor,
    last_token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    num_cached: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> None:
    """Set where the requests of a round stand, and count what it takes in as cached.

    All but the first two by `req_state_idx`.

    Args:
        start: of as many requests, to be set.
        idx_mapping: int64 [batch], each once.
        texts: int32 [max_num_reqs, length].
        last_token_ids: int64 [max_num_reqs, 1].
        num_computed: int32 [max_num_reqs], tokens of each text that the target has computed.
        num_cached: int64 [max_num_reqs], those that the draft's cache has; set to the former, or
            by `head - 1` higher where more are missing, which the round then does without.
        block_tables: int32 [max_num_reqs, n].
        block_size: tokens of a block.

    """
    head = start.heads.shape[1]
    for tensor in (*(getattr(start, field.name) for field in fields(start)), idx_mapping):
        assert tensor.is_contiguous()
    assert texts.stride(1) == block_tables.stride(1) == 1
    if not len(idx_mapping):
        return
    _begin_round_kernel[(len(idx_mapping),)](
        start.idx_mapping,
        start.last_token_ids,
        start.heads,
        start.num_head,
        start.num_cached,
        start.block_table,
        start.slot_mapping,
        idx_mapping,
        texts,
        last_token_ids,
        num_computed,
        num_cached,
        block_tables,
        texts.stride(0),
        block_tables.stride(0),
        start.block_table.stride(0),
        BLOCK_SIZE=block_size,
        HEAD=head,
        PLACES=triton.next_power_of_2(head),
        BLOCKS=256,
        num_warps=1,
    )


@triton.jit
def _begin_round_kernel(
    start_idx_mapping: tl.tensor,
    start_last_token_ids: tl.tensor,
    start_heads: tl.tensor,
    start_num_head: tl.tensor,
    start_num_cached: tl.tensor,
    start_block_table: tl.tensor,
    start_slot_mapping: tl.tensor,
    idx_mapping: tl.tensor,
    texts: tl.tensor,
    last_token_ids: tl.tensor,
    num_computed: tl.tensor,
    num_cached: tl.tensor,
    block_tables: tl.tensor,
    text_stride: tl.tensor,
    table_stride: tl.tensor,
    start_table_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """A program a request."""
    index = tl.program_id(0).to(tl.int64)
    state = tl.load(idx_mapping + index)
    num_cached_tokens = tl.load(num_cached + state)
    num_head = tl.minimum(tl.load(num_computed + state).to(tl.int64) - num_cached_tokens, HEAD - 1)
    num_tokens = num_cached_tokens + num_head
    table = block_tables + state * table_stride

    column = tl.arange(0, PLACES)
    place = column - HEAD + num_head
    token = num_cached_tokens + place
    is_token = (place >= 0) & (column < HEAD)
    head = tl.load(texts + state * text_stride + token, mask=is_token, other=0)
    tl.store(start_heads + index * HEAD + column, head.to(tl.int64), mask=column < HEAD)
    block = tl.load(table + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    slot = tl.where(is_token, block * BLOCK_SIZE + token % BLOCK_SIZE, -1)
    has_slot = (column > 0) & (column < HEAD)
    tl.store(start_slot_mapping + index * (HEAD - 1) + column - 1, slot, mask=has_slot)

    for first_block in range(0, tl.cdiv(num_tokens, BLOCK_SIZE), BLOCKS):
        offset = first_block + tl.arange(0, BLOCKS)
        is_block = offset < tl.cdiv(num_tokens, BLOCK_SIZE)
        blocks = tl.load(table + offset, mask=is_block, other=0)
        tl.store(start_block_table + index * start_table_stride + offset, blocks, mask=is_block)

    tl.store(start_idx_mapping + index, state)
    tl.store(start_last_token_ids + index, tl.load(last_token_ids + state))
    tl.store(start_num_head + index, num_head)
    tl.store(start_num_cached + index, num_cached_tokens)
    tl.debug_barrier()  # The other threads have read what one of them overwrites.
    tl.store(num_cached + state, num_tokens)
