"""Rounds of drafting on the V2 runner: where one begins, how it goes on, and CUDA graphs of them.

What is drafted in a round is computed again in each of its forwards, as a chain in front of the
lookahead rows. So nothing is written ahead of the text, nothing is taken back, and a block that
another request may read is the target's and the draft's alike. The first forward of a round writes
what the target has computed in the step, its head's tokens but the newest.

The number of forwards is fixed and all that differs between requests is in tensors, so nothing
waits for the device, and a whole round is one CUDA graph where the target has such graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_recycle.integration.cuda.draft_model import DraftForward

# The rows of more requests keep a device busy for longer than their launches take.
LARGEST_BATCH = 16


@dataclass(frozen=True, slots=True)
class RoundStart:
    """Where the requests of a round stand when it begins.

    Attributes:
        idx_mapping: int64 [batch].
        last_token_ids: int64 [batch].
        heads: int64 [batch, head], what the draft's cache lacks but for the last token, at the end
            of each row.
        num_head: int64 [batch], how many tokens these are.
        num_cached: int64 [batch], the tokens before them.
        block_table: int32 [batch, n].
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
        made = cls(
            idx_mapping=number,
            last_token_ids=torch.empty_like(number),
            heads=number.new_empty(batch, head),
            num_head=torch.empty_like(number),
            num_cached=torch.empty_like(number),
            block_table=number.new_empty(batch, num_blocks, dtype=torch.int32),
            slot_mapping=number.new_empty(batch, head - 1),
        )
        made.clear()
        return made

    def clear(self) -> None:
        """Make it one of requests that are none: it can be run, and writes no keys or values.

        What it teaches the proposer is nonsense; see `TreeWorker.compile_or_warm_up_model`.
        """
        for field in fields(self):
            getattr(self, field.name).zero_()
        self.num_head.fill_(1)
        self.slot_mapping.fill_(PAD_SLOT_ID)

    def first(self, batch: int) -> RoundStart:
        """Of the first requests; views."""
        return RoundStart(*(getattr(self, field.name)[:batch] for field in fields(self)))

    def copy_(self, other: RoundStart) -> None:
        """Take over another one, of as many requests."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))


class Round:
    """See `vllm_recycle.core.ouroboros.DraftModel`.

    Args:
        model: what is run.
        start: where the round begins.

    """

    def __init__(self, model: DraftForward, start: RoundStart) -> None:
        self.model, self.start = model, start
        self.heads, self.num_head, self.num_cached = start.heads, start.num_head, start.num_cached
        self.slot_mapping: torch.Tensor | None = start.slot_mapping

    def forward(
        self, idx_mapping: torch.Tensor, new_token_ids: torch.Tensor, row_token_ids: torch.Tensor
    ) -> torch.Tensor:
        """int64 [batch, nodes + 1]; a round has all of its requests in each forward."""
        hidden_states = self.take_in(new_token_ids, row_token_ids)
        return self.model.outputs(hidden_states, len(idx_mapping))

    def take_in(
        self, new_token_ids: torch.Tensor, row_token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A forward with these tokens, int64 [batch, n], padded with -1, behind the heads.

        Returns:
            See `DraftForward.run`.

        """
        place = torch.arange(self.heads.shape[1], device=self.heads.device)
        num_new = (new_token_ids >= 0).sum(dim=1)
        longer = torch.cat((self.heads, new_token_ids), dim=1)
        self.heads = longer.gather(1, place + num_new[:, None])
        self.num_head = self.num_head + num_new
        hidden_states = self.model.run(
            self.heads,
            self.num_head,
            self.num_cached,
            self.start.block_table,
            slot_mapping=self.slot_mapping,
            row_token_ids=row_token_ids,
        )
        if self.slot_mapping is not None:
            self.num_cached = self.num_cached + self.num_head - 1
            self.num_head, self.slot_mapping = torch.ones_like(self.num_head), None
        return hidden_states


class DraftGraphs(CudaGraphManager):
    """vLLM's captured graphs, one for each number of requests; none is filled up.

    Args:
        vllm_config: of the engine.
        device: where the draft model is.
        num_rows: of a request in a draft forward.
        max_drafting: requests of the largest round.

    """

    def __init__(
        self, vllm_config: Any, device: torch.device, *, num_rows: int, max_drafting: int
    ) -> None:
        self.descriptors = {
            batch: BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL, num_tokens=batch * num_rows, num_reqs=batch
            )
            for batch in range(min(max_drafting, LARGEST_BATCH), 0, -1)
        }
        super().__init__(vllm_config, device, CUDAGraphMode.FULL, decode_query_len=num_rows)

    def _init_candidates(self) -> None:
        self._capture_descs[CUDAGraphMode.FULL] = list(self.descriptors.values())

    def capture_rounds(self, run_round: Callable[[int], None]) -> None:
        """Capture `run_round` of each number of requests; all that differs is in its tensors."""
        self.capture(
            lambda desc, warmup: lambda mode: run_round(desc.num_reqs),
            "Capturing draft CUDA graphs",
        )

    def replay(self, batch: int) -> bool:
        """Run the round of so many requests; False where it was not captured."""
        desc = self.descriptors.get(batch)
        if desc not in self.graphs:
            return False
        self.run_fullgraph(desc)
        return True
