"""Token Recycling on the V1 runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.price import free
from vllm_recycle.core.token_recycling import TokenRecyclingProposer, TokenRecyclingState
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.integration.cpu.drafter import Ends, Texts, V1Drafter
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.options import TokenRecyclingOptions
from vllm_recycle.integration.saved_state import make_token_recycling_state
from vllm_recycle.kernels.cpu import native_operations


class TokenRecyclingV1Drafter(V1Drafter):
    """Grows a tree for each request, or fills a template, as far as the time of a step pays."""

    follows_steps = True
    proposer: TokenRecyclingProposer
    state: TokenRecyclingState

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config)
        options = self.options
        assert isinstance(options, TokenRecyclingOptions)
        self.isolates = options.isolates
        self.state = make_token_recycling_state(options, vllm_config, "cpu")
        self.proposer = TokenRecyclingProposer(
            self.state,
            max_nodes=options.num_nodes,
            tree=None if options.is_dynamic else options.load_tree(),
            seed_from_prompt=options.seed_from_prompt,
            operations=native_operations(),
        )

    def begin(self, req_state_idx: int, token_ids: torch.Tensor, num_computed_tokens: int) -> None:
        self.proposer.begin(req_state_idx, token_ids)

    def take_in(self, token_ids: Sequence[int], req_state_idx: int | None = None) -> None:
        self.proposer.take_in(torch.tensor(token_ids, dtype=torch.int64), req_state_idx)

    def observe(
        self, idx_mapping: torch.Tensor, step: StepLayout, logits: torch.Tensor
    ) -> torch.Tensor | None:
        proposer = self.proposer
        self.successors = proposer.operations.top_k(logits, proposer.layout.k)
        best = np.maximum(self.successors.numpy()[:, 0], 0)  # where no logit is a number
        return torch.from_numpy(best.astype(np.int64))

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
        self.proposer.learn(ends.tails(self.proposer.layout.reach), verified)

    def draft(self, texts: Texts, block_tables: Any) -> tuple[list[list[int]], list[list[int]]]:
        drafts: list[list[int]] = [[] for _ in texts.wants_draft]
        parents = drafts.copy()
        chosen = texts.wants_draft.nonzero()[0]
        for group in chosen[:, None] if self.isolates else [chosen]:
            if len(group):
                token_ids, above = self._propose(texts, group)
                of_each = zip(token_ids.tolist(), above.tolist(), strict=True)
                for index, (draft, of_nodes) in zip(group, of_each, strict=True):
                    drafts[index], parents[index] = draft, of_nodes
        return drafts, parents

    def _propose(self, texts: Texts, chosen: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts and parents of some requests, those that share the rows of the step.

        Under `isolated` each request drafts alone, as if all drafted as many nodes as it does, so
        that its size depends on its own text and on how many requests there are.
        """
        max_nodes = min(texts.num_nodes, self.proposer.num_nodes)
        batch, last = len(texts.wants_draft), texts.num_computed_tokens[chosen]
        load = batch, sum(last.tolist()) / len(last)
        prices = {
            kind: times.of_each(*load) if self.isolates else times.at(*load)
            for kind, times in self.step_times.items()
        }
        look = None if self.served is None else self.served.look_at(*load)
        if look is not None:
            kind, max_nodes = look[0], min(look[1], max_nodes)
            if kind is None:
                none = torch.empty(len(chosen), 0, dtype=torch.int64)
                return none, none
            prices = {kind: free(self.max_rows)}
        drafts, parents = self.proposer.propose(
            torch.from_numpy(texts.idx_mapping.numpy()[chosen]),
            Ends(texts.token_ids, chosen, last, texts.is_token).tails(self.proposer.layout.reach),
            max_depths=torch.from_numpy(texts.max_depths[chosen]),
            prices=prices,
            num_other_rows=0 if self.isolates else batch - len(chosen),
            max_nodes=max_nodes,
        )
        if self.served is not None and look is None:
            self.served.rows = 1 + int(np.count_nonzero(drafts.numpy() >= 0)) // len(chosen)
        return drafts, parents

    def describe(self) -> str:
        proposer, num_bytes = self.proposer, self.state.matrix.num_bytes
        cost = "measured" if self.row_cost is None else f"{self.row_cost:g} of a step"
        tree, what = proposer.tree, f"dynamic trees of at most {proposer.num_nodes} nodes"
        if tree is not None:
            what = f"tree {tree.name}, {tree.num_nodes} nodes, depth {tree.depth}"
        return (
            f"token_recycling: {what}, a row's cost {cost}, {self.state.describe()}, "
            f"{num_bytes:,} bytes, kernels in {proposer.operations.name}"
        )
