"""Rounds of drafting on the V2 runner: where one begins, how it goes on, and CUDA graphs of them.

What is drafted in a round is computed again in each of its forwards, as a chain in front of the
lookahead rows. So nothing is written ahead of the text, nothing is taken back, and a block that
another request may read is the target's and the draft's alike. The first forward of a round writes
what the target has computed and the draft has not, its head's tokens but the newest.

The number of forwards is fixed and all that differs between requests is in tensors, so nothing
waits for the device, and a whole round is one CUDA graph where the target has such graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_recycle.integration.cuda.ouroboros.forward import DraftForward
from vllm_recycle.integration.cuda.ouroboros.round_starts import RoundStart
from vllm_recycle.kernels.triton.top_k import top_k

# Rounds of more requests have no graph: each takes memory, and time at start-up.
LARGEST_BATCH = 32


class Round:
    """See `core.trunk.DraftModel`.

    A round has all of its requests in each forward.

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
        return self._logits(new_token_ids, row_token_ids).max(dim=-1).indices

    def choose(
        self,
        idx_mapping: torch.Tensor,
        new_token_ids: torch.Tensor,
        row_token_ids: torch.Tensor,
        choices: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._logits(new_token_ids, row_token_ids)
        shape = (*logits.shape[:2], choices)
        token_ids = top_k(logits.flatten(0, 1), choices).long().view(shape)
        total = logits.float().logsumexp(-1, keepdim=True)
        return token_ids, (logits.gather(-1, token_ids) - total).exp()

    def _logits(self, new_token_ids: torch.Tensor, row_token_ids: torch.Tensor) -> torch.Tensor:
        """[batch, nodes + 1, vocab], of a forward that takes in the one and tries the other."""
        columns = torch.arange(self.heads.shape[1], device=self.heads.device)
        num_new = (new_token_ids >= 0).sum(dim=1)
        heads = torch.cat((self.heads, new_token_ids), dim=1)
        self.heads = heads.gather(1, columns + num_new[:, None])
        self.num_head = self.num_head + num_new
        logits = self.model.run(
            self.heads,
            self.num_head,
            self.num_cached,
            row_token_ids,
            block_table=self.start.block_table,
            slot_mapping=self.slot_mapping,
        )
        if self.slot_mapping is not None:
            self.num_cached = self.num_cached + self.num_head - 1
            self.num_head, self.slot_mapping = torch.ones_like(self.num_head), None
        return logits.view(len(self.heads), -1, logits.shape[1])


class DraftGraphs(CudaGraphManager):
    """vLLM's captured graphs, one for each number of requests; none is filled up.

    Args:
        vllm_config: of the engine.
        device: where the draft model is.
        rows: of a request in a draft forward.
        max_drafting: the most requests of a round.

    """

    def __init__(
        self, vllm_config: Any, device: torch.device, *, rows: int, max_drafting: int
    ) -> None:
        self.descriptors = {
            batch: BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL, num_tokens=batch * rows, num_reqs=batch
            )
            for batch in range(min(max_drafting, LARGEST_BATCH), 0, -1)
        }
        super().__init__(vllm_config, device, CUDAGraphMode.FULL, decode_query_len=rows)

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
