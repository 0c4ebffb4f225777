"""Token Recycling on the V1 runner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_recycle.core.adjacency import Ends
from vllm_recycle.core.choose import Price
from vllm_recycle.core.copies import MIN_MATCH_CPU, Copies
from vllm_recycle.core.curve import TRUNKS, Load
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.explore import PLAIN, Arm
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.token_recycling import TokenRecyclingProposer
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.integration.cpu.drafter import LastDrafts, V1Drafter
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.start.versions import takes_images
from vllm_recycle.integration.token_recycling import TokenRecyclingDrafter
from vllm_recycle.kernels.cpu import calls


class TokenRecyclingV1Drafter(TokenRecyclingDrafter, V1Drafter):
    """Grows a tree for each request, or fills a template, as far as the time of a step pays."""

    proposer: TokenRecyclingProposer

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
            seeds_from_prompts=options.seeds_from_prompts,
            operations=calls,
        )
        # What stands in a text for an image is no token.
        if options.copies and not takes_images(vllm_config.model_config):
            classes = self.state.matrix.classes
            # Under `isolated` nobody's counts reach another.
            self.copies = Copies(
                classes, options.num_nodes, min_match=MIN_MATCH_CPU, counts=not self.isolates
            )

    def add_requests(self, requests: Sequence[NewRequest]) -> None:
        for request in requests:
            self.proposer.add_request(request)
            if self.copies is not None:
                self.copies.begin(request.req_state_idx, request.hint)

    def release(self, req_state_indices: Sequence[int]) -> None:
        super().release(req_state_indices)
        if self.copies is not None:
            for index in req_state_indices:
                self.copies.begin(index)

    def take_in(self, token_ids: Sequence[int], req_state_idx: int | None = None) -> None:
        self.proposer.take_in(token_ids, req_state_idx)

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
        if self.copies is not None:
            calls.learn_copies(self.copies, idx_mapping, ends, walked.token_ids)

    def draft(self, texts: TextEnds, num_nodes: int, block_tables: Any) -> Drafts:
        started, load, arm = time.perf_counter(), load_of(texts), None
        if self.chooser is not None and load is not None:
            arm = self.chooser.look(load)
        if self.copies is not None and load is not None and arm != PLAIN:
            pairs = zip(texts.ends.last_positions, texts.max_depths, strict=True)
            positions = [position if depth else -1 for position, depth in pairs]
            ends = replace(texts.ends, last_positions=positions)
            trunks = calls.draft_copies(self.copies, texts.idx_mapping, ends)
            texts = replace(texts, trunks=trunks)
        drafts, has_read = self.draft_step(texts, num_nodes, block_tables, arm)
        seconds = time.perf_counter() - started
        nodes, is_along_trunks = sum(map(len, drafts.token_ids)), drafts.kind == TRUNKS
        self.last_drafts = LastDrafts(nodes, drafts.expected, seconds, has_read, is_along_trunks)
        return drafts

    def draft_step(
        self, texts: TextEnds, num_nodes: int, block_tables: Any, arm: Arm | None
    ) -> tuple[Drafts, bool]:
        """The drafts of a step, which may be a look at an arm, and `LastDrafts.has_read`."""
        return self.grow(texts, num_nodes, arm), False

    def grow(
        self, texts: TextEnds, num_nodes: int, arm: Arm | None, *, along_trunks: bool = False
    ) -> Drafts:
        """The best drafts, or those of a look; `along_trunks` where a model made a round for them.

        Under `isolated` each request drafts alone, as if all drafted as many nodes as it does, so
        that its size depends on its own text and on how many requests there are.
        """
        load, batch = load_of(texts), len(texts.idx_mapping)
        max_nodes = min(num_nodes, self.proposer.num_nodes)
        if load is None or arm == PLAIN:
            return Drafts.none(batch)
        if self.isolates:
            parts = [self._grow_alone(texts.only(b), batch, max_nodes) for b in range(batch)]
            return Drafts(
                [part.token_ids[0] for part in parts], [part.parents[0] for part in parts]
            )
        if arm is not None and not along_trunks:
            kind, rows = arm
            max_nodes = min(max_nodes, rows - 1)
            return self.proposer.propose(texts, prices={kind: self.free}, max_nodes=max_nodes)
        shapes = self.curve.kinds_of(None)
        kinds = {shapes[0]: TRUNKS} if along_trunks else {shape: shape for shape in shapes}
        prices = {shape: self._price(kind, load) for shape, kind in kinds.items()}
        drafts = self.proposer.propose(texts, prices=prices, max_nodes=max_nodes)
        if self.chooser is not None and drafts.kind is not None:
            kind, nodes = kinds[drafts.kind], sum(map(len, drafts.token_ids))
            drafts = drafts._replace(kind=kind)
            self.chooser.best = kind, 1 + nodes // load.drafting
        return drafts

    def _grow_alone(self, text: TextEnds, batch: int, max_nodes: int) -> Drafts:
        if (load := load_of(text)) is None:
            return Drafts.none(1)
        prices = {}
        for kind in self.curve.kinds_of(None):
            seconds = self.curve.by_rows(kind, load._replace(requests=batch))
            prices[kind] = Price(seconds[::batch].contiguous())
        return self.proposer.propose(text, prices=prices, max_nodes=max_nodes)

    def _price(self, kind: str, load: Load) -> Price:
        """Of a step with drafts of a kind."""
        seconds = self.curve.by_rows(kind, load)
        return Price(seconds) if self.chooser is None else self.chooser.price(kind, seconds, load)

    def describe(self) -> str:
        proposer, num_bytes = self.proposer, self.state.matrix.table.nbytes
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
