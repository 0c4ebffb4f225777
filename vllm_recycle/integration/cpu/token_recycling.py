"""Token Recycling on the V1 runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_recycle.core.adjacency import Ends
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.token_recycling import TokenRecyclingProposer, TokenRecyclingState
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.integration.cpu.drafter import V1Drafter
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.options import TokenRecyclingOptions
from vllm_recycle.integration.saved_state import make_token_recycling_state
from vllm_recycle.kernels.cpu import native_operations


class TokenRecyclingV1Drafter(V1Drafter):
    """Grows a tree for each request, or fills a template, as far as the time of a step pays."""

    proposer: TokenRecyclingProposer
    state: TokenRecyclingState

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config)
        options = self.options
        assert isinstance(options, TokenRecyclingOptions)
        self.isolates = options.isolates
        self.free = torch.ones(1 + self.max_rows, dtype=torch.float64)  # where rows cost nothing
        self.state = make_token_recycling_state(options, vllm_config, "cpu")
        self.proposer = TokenRecyclingProposer(
            self.state,
            max_nodes=options.num_nodes,
            tree=None if options.is_dynamic else options.load_tree(),
            seed_from_prompt=options.seed_from_prompt,
            operations=native_operations(),
        )

    def begin(self, req_state_idx: int, token_ids: torch.Tensor) -> None:
        self.proposer.begin(req_state_idx, token_ids)

    def take_in(self, token_ids: Sequence[int], req_state_idx: int | None = None) -> None:
        self.proposer.take_in(torch.tensor(token_ids, dtype=torch.int64), req_state_idx)

    def observe(
        self, idx_mapping: torch.Tensor, step: StepLayout, logits: torch.Tensor
    ) -> torch.Tensor | None:
        proposer = self.proposer
        self.successors, best = proposer.operations.top_k(logits, proposer.layout.k)
        return best

    def accept(
        self, idx_mapping: torch.Tensor, step: StepLayout, walked: WalkResult, ends: Ends
    ) -> None:
        verified = VerifiedStep(
            idx_mapping,
            step.trees.parents,
            step.row_token_ids,
            step.cu_num_logits,
            self.successors,
            walked,
        )
        self.proposer.learn(ends, verified)

    def draft(self, texts: TextEnds, num_nodes: int, block_tables: Any) -> Drafts:
        batch = len(texts.idx_mapping)
        if not self.isolates:
            return self._propose(texts, batch, num_nodes)
        each = [self._propose(texts.only(index), batch, num_nodes) for index in range(batch)]
        token_ids, parents, _ = zip(*each, strict=True)
        return Drafts([draft for (draft,) in token_ids], [of_nodes for (of_nodes,) in parents])

    def _propose(self, texts: TextEnds, batch: int, num_nodes: int) -> Drafts:
        """Drafts of some requests of a batch, those that share the rows of the step.

        Under `isolated` each request drafts alone, as if all drafted as many nodes as it does, so
        that its size depends on its own text and on how many requests there are.
        """
        depths = texts.max_depths
        lengths = [last for last, depth in zip(texts.ends.last, depths, strict=True) if depth]
        none = Drafts([[] for _ in depths], [[] for _ in depths])
        if not lengths:
            return none
        load = batch, sum(lengths) / len(lengths)
        look = None if self.served is None else self.served.look_at(*load)
        kind, most = (None, self.proposer.num_nodes) if look is None else look
        if look is not None and kind is None:
            return none
        drafts = self.proposer.propose(
            texts,
            prices=self.prices(*load) if kind is None else {kind: self.free},
            max_nodes=min(num_nodes, most),
        )
        if look is not None:
            return drafts._replace(rate=0.0)
        if self.served is not None:
            self.served.rows = 1 + sum(map(len, drafts.token_ids)) // len(lengths)
        return drafts

    def prices(self, num_reqs: int, context: float) -> dict[str, torch.Tensor]:
        """Of a step of so many requests behind so many tokens, by what its drafts are."""
        return {
            kind: times.of_each(num_reqs, context) if self.isolates else times.at(num_reqs, context)
            for kind, times in self.step_times.items()
        }

    def describe(self) -> str:
        proposer, num_bytes = self.proposer, self.state.matrix.num_bytes
        cost = "measured" if (cost := self.options.row_cost) is None else f"{cost:g} of a step"
        tree, what = proposer.tree, f"dynamic trees of at most {proposer.num_nodes} nodes"
        if tree is not None:
            what = f"tree {tree.name}, {tree.num_nodes} nodes, depth {tree.depth}"
        return (
            f"token_recycling: {what}, a row's cost {cost}, {self.state.describe()}, "
            f"{num_bytes:,} bytes, kernels in {proposer.operations.name}"
        )
