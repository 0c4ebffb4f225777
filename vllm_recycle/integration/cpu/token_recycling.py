"""Token Recycling on the V1 runner."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import torch

from vllm_recycle.core.adjacency import Ends
from vllm_recycle.core.choose import Price
from vllm_recycle.core.curve import Load
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.explore import PLAIN, Arm
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.owners import Owner
from vllm_recycle.core.token_recycling import TokenRecyclingProposer, TokenRecyclingState
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.integration.cpu.drafter import LastDrafts, V1Drafter
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.options import TokenRecyclingOptions
from vllm_recycle.kernels.cpu import calls


class TokenRecyclingV1Drafter(V1Drafter):
    """Grows a tree for each request, or fills a template, as far as the time of a step pays."""

    options: TokenRecyclingOptions
    proposer: TokenRecyclingProposer
    state: TokenRecyclingState
    arm: Arm | None = None  # of a look
    round_seconds = 0.0  # that a draft model took for the last drafts

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config)
        options = self.options
        self.isolates = options.isolates
        self.free = Price(torch.ones(1 + self.max_rows, dtype=torch.float64))
        self.state = options.make_state(vllm_config, "cpu")
        self.proposer = TokenRecyclingProposer(
            self.state,
            max_nodes=options.num_nodes,
            tree=None if options.is_dynamic else options.load_tree(),
            seed_from_prompt=options.seeds_from_prompts,
            operations=calls,
        )

    def begin(
        self, req_state_idx: int, token_ids: torch.Tensor, request_class: int, owner: Owner | None
    ) -> None:
        self.proposer.begin(req_state_idx, token_ids, request_class, owner)

    def weights_changed(self) -> None:
        super().weights_changed()
        self.state.acceptance.halve()

    def forget(self, owners: Collection[str | int]) -> int:
        return self.state.matrix.forget(owners)

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
        started, self.arm, self.round_seconds = time.perf_counter(), None, 0.0
        if self.chooser is not None and (load := load_of(texts)) is not None:
            self.arm = self.chooser.look(load)
        drafts = self._draft(texts, num_nodes, block_tables)
        seconds = time.perf_counter() - started - self.round_seconds
        nodes = sum(map(len, drafts.token_ids))
        self.last_drafts = LastDrafts(nodes, drafts.expected, seconds, self.round_seconds)
        return drafts

    def _draft(self, texts: TextEnds, num_nodes: int, block_tables: Any) -> Drafts:
        batch = len(texts.idx_mapping)
        if not self.isolates:
            return self._propose(texts, batch, num_nodes)
        parts = [self._propose(texts.only(index), batch, num_nodes) for index in range(batch)]
        return Drafts([part.token_ids[0] for part in parts], [part.parents[0] for part in parts])

    def _propose(self, texts: TextEnds, batch: int, num_nodes: int) -> Drafts:
        """Drafts of some requests of a batch, those that share the rows of the step.

        Under `isolated` each request drafts alone, as if all drafted as many nodes as it does, so
        that its size depends on its own text and on how many requests there are.
        """
        load = load_of(texts)
        if load is None or self.arm == PLAIN:
            return Drafts.none(len(texts.idx_mapping))
        if self.arm is not None:
            kind, rows = self.arm
            max_nodes = min(num_nodes, rows - 1)
            drafts = self.proposer.propose(texts, prices={kind: self.free}, max_nodes=max_nodes)
            return drafts._replace(rate=0.0)
        prices = self.prices(load._replace(requests=batch))
        max_nodes = min(num_nodes, self.proposer.num_nodes)
        drafts = self.proposer.propose(texts, prices=prices, max_nodes=max_nodes)
        if self.chooser is not None and drafts.kind is not None:
            nodes = sum(map(len, drafts.token_ids))
            self.chooser.best = drafts.kind, 1 + nodes // load.drafting
        return drafts

    def prices(self, load: Load) -> dict[str, Price]:
        """Of a step with drafts of each kind."""
        prices = {}
        for kind in self.curve.kinds:
            seconds = self.seconds(kind, load)
            if self.chooser is not None:
                prices[kind] = self.chooser.price(kind, seconds, load)
            elif self.isolates:  # as if each request had as many rows
                prices[kind] = Price(seconds[:: load.requests].contiguous())
            else:
                prices[kind] = Price(seconds)
        return prices

    def seconds(self, kind: str, load: Load) -> torch.Tensor:
        """Of a step by its rows, float64 [rows + 1]."""
        return self.curve.by_rows(kind, load)

    def describe(self) -> str:
        proposer, num_bytes = self.proposer, self.state.matrix.num_bytes
        cost = "measured" if (cost := self.options.row_cost) is None else f"{cost:g} of a step"
        tree, shape = proposer.tree, f"dynamic trees of at most {proposer.num_nodes} nodes"
        if tree is not None:
            shape = f"tree {tree.name}, {tree.num_nodes} nodes, depth {tree.depth}"
        return (
            f"token_recycling: {shape}, a row's cost {cost}, {self.state.describe()}, "
            f"{num_bytes:,} bytes"
        )


def load_of(texts: TextEnds) -> Load | None:
    """The load of a step that drafts behind some texts; None where no text may have a draft."""
    pairs = zip(texts.ends.last_positions, texts.max_depths, strict=True)
    lengths = [length for length, depth in pairs if depth]
    batch = len(texts.idx_mapping)
    return Load(batch, sum(lengths) / len(lengths), len(lengths)) if lengths else None
