"""Where a round of drafting begins: what a draft model's cache lacks of some texts.

What it gives has tensors that never move, for CUDA graphs of whole rounds. Nothing waits for the
device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_recycle.integration.cuda.ouroboros.cache import DraftCache


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

    def begin(
        self, idx_mapping: torch.Tensor, req_states: Any, cache: DraftCache, tables: torch.Tensor
    ) -> None:
        """Set where the requests of a round stand, and count what it takes in as cached.

        Of those that more is missing of than a head has, the round does without the rest.

        Args:
            idx_mapping: int64 [batch], each once; as many as these are of.
            req_states: vLLM's.
            cache: what the draft model's KV cache has of each text.
            tables: int32 [max_num_reqs, n], the blocks of all requests.

        """
        states, head, size = idx_mapping.long(), self.heads.shape[1], cache.blocks.block_size
        cached = cache.num_cached[states]
        num_computed = req_states.num_computed_tokens.gpu[states]
        num_head = (num_computed - cached).clamp(max=head - 1)
        ends = cached + num_head
        tokens = ends[:, None] + torch.arange(-head, 0, device=ends.device)
        is_missing = tokens >= cached[:, None]
        # Of what is not missing, any token.
        tokens, rows = tokens.clamp(min=0), states[:, None]
        slots = tables[rows, tokens // size].long() * size + tokens % size
        values = RoundStart(
            idx_mapping=states,
            last_token_ids=req_states.last_sampled_tokens[states, 0],
            heads=req_states.all_token_ids.gpu[rows, tokens].where(is_missing, 0),
            num_head=num_head,
            num_cached=cached,
            block_table=tables[states],
            slot_mapping=slots.where(is_missing, PAD_SLOT_ID)[:, 1:],
        )
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(values, field.name))
        cache.num_cached.index_copy_(0, states, ends)
