"""Token Recycling with grown trees on the V1 runner."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_recycle.core import Trees, WalkResult
from vllm_recycle.core.token_recycling import TokenRecyclingProposer, TokenRecyclingState
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.config import get_options
from vllm_recycle.integration.cpu.drafter import Ends, PricedV1Drafter, Texts
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.options import TokenRecyclingOptions
from vllm_recycle.integration.saved_state import make_token_recycling_state
from vllm_recycle.kernels.cpu import native_operations
from vllm_recycle.kernels.cpu.drafting import native_dynamic_operations


class TokenRecyclingV1Drafter(PricedV1Drafter):
    """Grows a tree for each request, priced by the time of a step."""

    proposer: TokenRecyclingProposer
    state: TokenRecyclingState

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        options = get_options(vllm_config)
        assert isinstance(options, TokenRecyclingOptions)
        self.read_prices()
        self.isolates = options.isolates
        self.state = make_token_recycling_state(options, vllm_config, "cpu")
        self.proposer = TokenRecyclingProposer(
            self.state,
            max_nodes=options.num_nodes,
            max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
            seed_from_prompt=options.seed_from_prompt,
            operations=native_operations(),
            dynamic_operations=native_dynamic_operations(),
        )

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Nothing; vLLM asks it of every drafter."""

    def begin(self, req_state_idx: int, token_ids: torch.Tensor, num_computed_tokens: int) -> None:
        self.proposer.begin(req_state_idx, token_ids)

    def trees_of(self, idx_mapping: torch.Tensor) -> Trees:
        return self.proposer.trees_of(idx_mapping)

    def observe(
        self, idx_mapping: torch.Tensor, trees: StepLayout, logits: torch.Tensor
    ) -> torch.Tensor | None:
        proposer = self.proposer
        self.successors = proposer.dynamic_operations.top_k(logits, proposer.layout.k)
        return self.successors[:, 0].long().clamp(min=0)  # where no logit is a number

    def accept(
        self,
        idx_mapping: torch.Tensor,
        trees: StepLayout,
        walked: WalkResult,
        ends: Ends,
    ) -> None:
        tails = ends.tails(self.proposer.layout.reach)
        tails[trees.row_token_ids[trees.cu_num_logits[:-1]] == NO_TOKEN] = NO_TOKEN
        self.proposer.learn(
            idx_mapping,
            tails,
            trees.trees,
            trees.row_token_ids,
            trees.cu_num_logits,
            self.successors,
            walked,
        )

    def draft(self, texts: Texts, block_tables: Any) -> torch.Tensor:
        max_nodes = min(texts.num_nodes, self.proposer.num_nodes)
        drafts = torch.full((len(texts.wants_draft), max_nodes), -1)
        chosen = np.nonzero(texts.wants_draft)[0]
        for group in chosen[:, None] if self.isolates else [chosen]:
            if len(group):
                drafts[group] = self._grow(texts, group, max_nodes)
        return drafts

    def _grow(self, texts: Texts, chosen: np.ndarray, max_nodes: int) -> torch.Tensor:
        """Trees of some requests, int64 [n, nodes]: those that share the rows of the step.

        Under `isolated` each is grown alone, as if all drafted as many nodes as it does.
        """
        batch, last = len(texts.wants_draft), texts.num_computed_tokens[chosen]
        prices = self.step_times.of_each if self.isolates else self.step_times.at
        times, slopes = prices(batch, float(last.mean()))
        return self.proposer.propose(
            texts.idx_mapping[chosen],
            Ends(texts.token_ids, chosen, last).tails(self.proposer.layout.reach),
            max_depths=torch.from_numpy(texts.max_depths[chosen]),
            times=times,
            slopes=slopes,
            num_other_rows=0 if self.isolates else batch - len(chosen),
            max_nodes=max_nodes,
        )

    def describe(self) -> str:
        proposer, rows = self.proposer, self.state.rows
        cost = "measured" if self.row_cost is None else f"{self.row_cost:g} of a step"
        return (
            f"token_recycling: dynamic trees of at most {proposer.num_nodes} nodes, a row's cost "
            f"{cost}, k {rows.layout.k}, contexts {list(rows.layout.contexts)}, scope "
            f"{rows.scope}, reads what others wrote {rows.layout.reads_shared}, "
            f"{rows.num_written} of {len(rows.table)} rows known, {rows.num_bytes:,} bytes, "
            f"kernels in {proposer.dynamic_operations.name}"
        )
