"""Token Recycling with grown trees on Model Runner V2: all of it lives on the device.

Each request's tree has as many nodes as the largest size. What a row costs is not looked at on the
device: what each node is worth is told to the scheduler, which takes the first ones of each tree.
Topology is data, in buffers that never move, for the kernels of the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_recycle.core import WalkResult
from vllm_recycle.core.beam import BEAM, LEVELS
from vllm_recycle.core.token_recycling import TokenRecyclingState
from vllm_recycle.integration.cuda.drafter import V2Drafter
from vllm_recycle.integration.options import TokenRecyclingOptions, options_of
from vllm_recycle.integration.saved_state import make_token_recycling_state
from vllm_recycle.kernels.triton.matrix.count import DeviceCounts
from vllm_recycle.kernels.triton.matrix.grow import grow_by_levels
from vllm_recycle.kernels.triton.matrix.learn import learn
from vllm_recycle.kernels.triton.matrix.seed import seed
from vllm_recycle.kernels.triton.operations import OPERATIONS
from vllm_recycle.kernels.triton.text_tails import read_tails
from vllm_recycle.kernels.triton.top_k import top_k
from vllm_recycle.kernels.triton.trees import DeviceTrees


class DeviceProposer:
    """What grows on the device, for whom nobody but its drafter asks.

    Attributes:
        trees: of all requests, by `req_state_idx`.
        counts: what the state's counts are on the device.
        stamps: int32 [addresses], for learning; zero between steps.
        roots: int64 [max_num_reqs, 1], the path of each request where none has a tree.

    """

    operations = OPERATIONS

    def __init__(self, state: TokenRecyclingState, *, max_nodes: int, max_num_reqs: int) -> None:
        table = state.rows.table
        depth = min(LEVELS, max_nodes)
        self.trees = DeviceTrees.make(max_num_reqs, max_nodes, depth=depth, device=table.device)
        self.counts = DeviceCounts.of(state.acceptance)
        self.stamps = torch.zeros(len(table), dtype=torch.int32, device=table.device)
        self.roots = torch.zeros(max_num_reqs, 1, dtype=torch.int64, device=table.device)
        self.max_depths = torch.full((max_num_reqs,), depth, dtype=torch.int32, device=table.device)

    def release(self, req_state_indices: Sequence[int]) -> None:
        """These requests ended; what they wrote for themselves is found by nobody any more."""


class TokenRecyclingV2Drafter(V2Drafter):
    """Grows a tree for each request.

    Args:
        vllm_config: of the engine.
        device: where all of it lives.
        req_states: the runner's, whose texts are read.

    """

    proposer: DeviceProposer
    state: TokenRecyclingState
    successors: torch.Tensor  # int32 [logit rows, k], of the step
    worth: torch.Tensor  # float32 [batch, nodes], of the trees that were grown last

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        self.vllm_config, self.req_states = vllm_config, req_states
        options = options_of(vllm_config)
        assert isinstance(options, TokenRecyclingOptions)
        self.seeds = options.seed_from_prompt
        self.state = make_token_recycling_state(options, vllm_config, device)
        self.proposer = DeviceProposer(
            self.state,
            max_nodes=options.num_nodes,
            max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
        )

    @property
    def tree(self) -> DeviceTrees:
        return self.proposer.trees

    def reset(self) -> None:
        super().reset()
        self.proposer.counts.rates.copy_(self.state.acceptance.rates())

    def begin(
        self, all_token_ids: torch.Tensor, req_state_indices: Sequence[int], lengths: Sequence[int]
    ) -> None:
        rows = self.state.rows
        for req_state_idx in req_state_indices:
            rows.begin(req_state_idx)
        if self.seeds:
            seed(
                rows.table,
                self.proposer.stamps,
                all_token_ids,
                layout=rows.layout,
                salts=rows.salts,
                req_state_indices=req_state_indices,
                lengths=lengths,
            )

    def observe(self, input_batch: Any, row_token_ids: torch.Tensor, logits: torch.Tensor) -> None:
        self.successors = top_k(logits, self.state.rows.layout.k)

    def accept(
        self,
        input_batch: Any,
        row_token_ids: torch.Tensor,
        output: Any,
        path: torch.Tensor | None,
    ) -> None:
        rows, proposer = self.state.rows, self.proposer
        if path is None:
            path = proposer.roots[: input_batch.num_reqs]
        learn(
            rows.table,
            proposer.stamps,
            # Under `isolated` nobody's counts reach another: what is shipped serves.
            proposer.counts if rows.layout.writes_shared else None,
            layout=rows.layout,
            idx_mapping=input_batch.idx_mapping,
            salts=rows.salts,
            tails=self._tails(input_batch.idx_mapping),
            parents=proposer.trees.parents,
            row_token_ids=row_token_ids,
            cu_num_logits=input_batch.cu_num_logits,
            successors=self.successors,
            walked=WalkResult(path, output.sampled_token_ids.long(), output.num_sampled),
            max_rows=1 + (proposer.trees.num_nodes if input_batch.num_draft_tokens else 0),
            learns=output.num_sampled,  # nothing in the middle of a prompt
        )

    def propose(self, idx_mapping: torch.Tensor, last_sampled: torch.Tensor) -> torch.Tensor:
        """int64 [batch, nodes], -1 where there is no draft."""
        rows, proposer = self.state.rows, self.proposer
        batch, nodes = len(idx_mapping), proposer.trees.num_nodes
        drafts = torch.empty(batch, nodes, dtype=torch.int64, device=idx_mapping.device)
        self.worth = torch.empty(batch, nodes, device=idx_mapping.device)
        grow_by_levels(
            drafts,
            self.worth,
            rows.table,
            proposer.counts.rates,
            idx_mapping,
            layout=rows.layout,
            salts=rows.salts,
            tails=self._tails(idx_mapping),
            max_depths=proposer.max_depths[:batch],
            trees=proposer.trees,
            beam=BEAM,
        )
        return drafts

    def _tails(self, idx_mapping: torch.Tensor) -> torch.Tensor:
        """int64 [batch, reach], the ends of the texts, each with its root or newest token."""
        texts, total_len = self.req_states.all_token_ids.gpu, self.req_states.total_len.gpu
        return read_tails(texts, idx_mapping, total_len, reach=self.state.rows.layout.reach)

    def describe(self) -> str:
        rows = self.state.rows
        num_bytes = rows.num_bytes + self.proposer.stamps.nbytes
        return (
            f"token_recycling: dynamic trees of at most {self.tree.num_nodes} nodes and "
            f"{self.tree.depth} levels, k {rows.layout.k}, contexts {list(rows.layout.contexts)}, "
            f"scope {rows.scope}, reads what others wrote {rows.layout.reads_shared}, "
            f"{rows.num_written} of {len(rows.table)} rows known, {num_bytes:,} bytes, kernels in "
            f"{self.proposer.operations.name}"
        )
