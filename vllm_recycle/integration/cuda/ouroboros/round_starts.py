"""Where a round of drafting begins: what a draft model's cache lacks of some texts.

What it gives has tensors that never move, for CUDA graphs of whole rounds. Nothing waits for the
device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID


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
        block_table: int32 [batch, n], the blocks that hold all of these.
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
        self.slot_mapping.fill_(PAD_SLOT_ID)

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
    states, head = idx_mapping.long(), start.heads.shape[1]
    cached = num_cached[states]
    num_head = (num_computed[states] - cached).clamp(max=head - 1)
    ends = cached + num_head
    tokens = ends[:, None] + torch.arange(-head, 0, device=ends.device)
    is_missing = tokens >= cached[:, None]
    # Of what is not missing, any token.
    tokens, rows = tokens.clamp(min=0), states[:, None]
    slots = block_tables[rows, tokens // block_size].long() * block_size + tokens % block_size
    values = RoundStart(
        idx_mapping=states,
        last_token_ids=last_token_ids[states, 0],
        heads=texts[rows, tokens].where(is_missing, 0),
        num_head=num_head,
        num_cached=cached,
        block_table=block_tables[states],
        slot_mapping=slots.where(is_missing, PAD_SLOT_ID)[:, 1:],
    )
    for field in fields(start):
        getattr(start, field.name).copy_(getattr(values, field.name))
    num_cached.index_copy_(0, states, ends)
