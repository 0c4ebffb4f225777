"""Rounds of drafting on the V2 runner: what one begins with, and CUDA graphs of whole ones.

A round is launch after launch of small kernels, and what differs from round to round is in tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

# The rows of more requests keep a device busy for longer than their launches take.
LARGEST_BATCH = 16


@dataclass(slots=True)
class Round:
    """Where the requests of a round stand.

    Attributes:
        idx_mapping: int64 [batch].
        last_token_ids: int64 [batch].
        heads: int64 [batch, head], what the draft's cache lacks, at the end of each row.
        num_head: int64 [batch], how many tokens these are.
        num_cached: int64 [batch], the tokens before them.
        block_table: int32 [batch, n].
        slot_mapping: int64 [batch, head - 1], where the first of the head are to be written, -1 for
            nowhere; None where none are.

    """

    idx_mapping: torch.Tensor
    last_token_ids: torch.Tensor
    heads: torch.Tensor
    num_head: torch.Tensor
    num_cached: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor | None

    @classmethod
    def make(cls, batch: int, head: int, num_blocks: int, device: torch.device) -> Round:
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
        self.slot_mapping.fill_(PAD_SLOT_ID)  # type: ignore[union-attr]

    def first(self, batch: int) -> Round:
        """Of the first requests; views."""
        return Round(*(getattr(self, field.name)[:batch] for field in fields(self)))

    def copy_(self, other: Round) -> None:
        """Take over another round, of as many requests."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))


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
