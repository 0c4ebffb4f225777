"""A draft model on Model Runner V2: the forwards of a round, over the same rows of each request.

First come the rows of a request's head, the tokens that the cache lacks, which end where those that
look ahead begin. The mask is the same for all requests; a forward is only told how many of
a request's first rows are none. What has no slot is never written: keys and values of rows are the
forward's own.

What is drafted in a round is computed again in each of its forwards, as a chain in front of the
lookahead rows. So nothing is written ahead of the text, nothing is taken back, and a block that
another request may read is the target's and the draft's alike. The first forward of a round writes
what the target has computed and the draft has not, its head's tokens but the newest.

The number of forwards is fixed and all that differs between requests is in tensors, so nothing
waits for the device. A whole round is one CUDA graph where the target has such graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.integration.cuda.ouroboros.round_starts import RoundStart
from vllm_recycle.kernels.triton.attention.queries import TreeQueries
from vllm_recycle.kernels.triton.top_k import top_k
from vllm_recycle.kernels.triton.trees import DeviceTrees

# Rounds of more requests have no graph: each takes memory, and time at start-up.
LARGEST_BATCH = 32


class DraftForward:
    """What all forwards of vLLM's draft model have in common.

    Args:
        speculator: of vLLM, that has the model.
        head_length: rows of a head.
        lookahead: the rows that look ahead; None for none.

    Attributes:
        num_rows: of a request.

    """

    def __init__(self, speculator: Any, head_length: int, lookahead: TreeTemplate | None) -> None:
        # A chain, and the lookahead rows below its end.
        end = head_length - 1
        nodes = [(row, 0) for row in range(end)]
        if lookahead is not None:
            nodes += [(end + parent, rank) for parent, rank in lookahead.nodes]
        template, device = TreeTemplate(tuple(nodes), "draft forward"), speculator.device
        self.head_length, self.num_rows = head_length, len(template.depths)
        self.depths = template.depths.to(device)
        self.trees = DeviceTrees.of(template, speculator.max_num_reqs, device)
        self.speculator, self.query_starts = speculator, speculator.arange_gpu
        self.layer_names = speculator.draft_attn_layer_names


class Round:
    """See `core.trunk.DraftModel`.

    A round has all of its requests in each forward.

    Args:
        model: what is run.
        start: where the round begins.

    """

    def __init__(self, model: DraftForward, start: RoundStart) -> None:
        self.model, self.block_table = model, start.block_table
        self.heads, self.num_head, self.num_cached = start.heads, start.num_head, start.num_cached
        self.slot_mapping: torch.Tensor | None = start.slot_mapping

    def choose(
        self,
        idx_mapping: torch.Tensor,
        new_token_ids: torch.Tensor,
        row_token_ids: torch.Tensor,
        choices: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = torch.arange(self.model.head_length, device=self.heads.device)
        num_new = (new_token_ids >= 0).sum(dim=1)
        heads = torch.cat((self.heads, new_token_ids), dim=1)
        self.heads = heads.gather(1, columns + num_new[:, None])
        self.num_head = self.num_head + num_new
        logits = self._logits(row_token_ids)
        token_ids = top_k(logits, choices).long()
        shape = len(heads), -1, choices
        if choices == 1:
            return token_ids.view(shape), torch.zeros_like(token_ids).view(shape)
        total = logits.float().logsumexp(-1, keepdim=True)
        return token_ids.view(shape), (logits.gather(-1, token_ids) - total).exp().view(shape)

    def _logits(self, row_token_ids: torch.Tensor) -> torch.Tensor:
        """[batch * (nodes + 1), vocab], behind the heads and the nodes of one forward."""
        model, batch = self.model, len(self.heads)
        num_padding = model.head_length - self.num_head
        positions = (self.num_cached - num_padding)[:, None] + model.depths
        rows = TreeQueries(
            ancestor_bits=model.trees.ancestor_bits,
            depths=model.trees.depths,
            idx_mapping=model.query_starts[:batch],  # one tree is as the other
            query_start_loc=model.query_starts[: batch + 1] * model.num_rows,
            seq_lens=(self.num_cached + model.num_rows).to(torch.int32),
            block_table=self.block_table,
            max_rows=model.num_rows,
            num_rows=batch * model.num_rows,
            num_padding=num_padding.to(torch.int32),
        )
        slot_mappings = {}
        if self.slot_mapping is not None:
            num_unwritten = model.num_rows - self.slot_mapping.shape[1]
            slots = pad(self.slot_mapping, (0, num_unwritten), value=PAD_SLOT_ID)
            slot_mappings = dict.fromkeys(model.layer_names, slots.flatten())
        token_ids = torch.cat((self.heads, row_token_ids), dim=1)
        hidden_states = model.speculator._run_model(
            token_ids.clamp(min=0).flatten().to(torch.int32),
            # Padding, and rows beyond what the model can see, are computed for nothing.
            positions.clamp(min=0, max=model.speculator.max_model_len - 1).flatten(),
            dict.fromkeys(model.layer_names, rows),
            slot_mappings,
            None,
        )
        if self.slot_mapping is not None:
            self.num_cached = self.num_cached + self.num_head - 1
            self.num_head, self.slot_mapping = torch.ones_like(self.num_head), None
        states = hidden_states.view(batch, model.num_rows, -1)[:, model.head_length - 1 :]
        return model.speculator.model.compute_logits(states.flatten(0, 1))


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
