"""Token Recycling along the chains of a proposer of vLLM's, on the V1 runner.

vLLM's proposer drafts behind a step as if a chain had been verified: heads read the target's hidden
states, token ids and positions at the accepted rows, which after a walk are brought to the places
that a chain's rows have. Its chain is the trunk of the trees.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_recycle.core.grow import TextEnds, Trunks
from vllm_recycle.core.trunk import CHOICES
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cpu.along_trunks import AlongTrunks, shortest
from vllm_recycle.integration.drafter import from_first_rank
from vllm_recycle.integration.options import settings_of

# vLLM's proposers that draft place by place from what `AcceptedSteps` prepares; not all versions
# have all of them. EAGLE's is that of MTP too.
PROPOSERS = ("Eagle", "Medusa")


class HostedTrunkV1Drafter(AlongTrunks):
    """Drafts trees along what vLLM's proposer of the runner drafts.

    Attributes:
        is_model: whether the proposer is a model, whose chains take time, and have probabilities;
            Medusa's heads are none.

    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        self.length = settings_of(vllm_config).options.trunk_length
        super().__init__(vllm_config, device, runner, length=self.length)
        self.runner, self.host = runner, runner.drafter
        name = type(self.host).__name__
        if name.removesuffix("Proposer") not in PROPOSERS:
            raise NotImplementedError(
                f"token_recycling does not support a trunk by {name}; change it, or leave it out"
            )
        self._best: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.is_model = isinstance(self.host, SpecDecodeBaseProposer)
        self.choices.has_probabilities = self.is_model
        self.host.num_speculative_tokens = self.length  # not those of a tree
        if self.is_model:
            self.host._greedy_sample = self._choose
            self._propose = self.host.propose
            self.host.propose = self._propose_with_own_lengths
            self._share_embeddings = self.host._maybe_share_embeddings
            self.host._maybe_share_embeddings = self._share_plain_embeddings

    @property
    def attention_layers(self) -> Set[str]:
        return self.host._draft_attn_layer_names if self.is_model else frozenset()

    def draft_trunks(self, texts: TextEnds, block_tables: Any, rate: float) -> Trunks | None:
        # A model reads each step, whether it drafts or not; Medusa's heads have one length.
        depths = torch.tensor(texts.max_depths)
        trunks = self._draft(self.length if depths.any() or not self.is_model else 0)
        if not depths.any():
            return None
        trunks.token_ids[depths == 0] = NO_TOKEN
        return trunks

    def _draft(self, length: int) -> Trunks:
        """Trunks of so many tokens behind the step of the runner, or of fewer.

        To be called once behind each step: with 0, a model reads the step alone.

        Returns:
            Trunks with probabilities in the place of chances; a half where none is known.

        """
        self._best.clear()
        chains = self.runner.draft_chains(length)[:, :length]
        shape = len(chains), length, CHOICES
        if self._best:
            # One forward may choose the tokens of all places, request by request.
            parts = [torch.stack(values, dim=1) for values in zip(*self._best, strict=True)]
            token_ids, probabilities = (part.view(shape) for part in parts)
            return Trunks(token_ids, probabilities)
        token_ids = torch.full(shape, NO_TOKEN)
        token_ids[:, : chains.shape[1], 0] = chains
        return Trunks(token_ids, (token_ids != NO_TOKEN).double() / 2)

    def _choose(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The best token of each row, int64 [rows]; the best ones are kept."""
        logits = self.host.model.compute_logits(hidden_states).float()
        best = logits.topk(CHOICES)
        probabilities = (best.values - logits.logsumexp(dim=1, keepdim=True)).exp().double()
        self._best.append((best.indices, probabilities))
        return best.indices[:, 0].contiguous()

    def _share_plain_embeddings(self, target_language_model: torch.nn.Module) -> None:
        self._share_embeddings(target_language_model)
        # A head has no adapters: theirs are set for the rows of the target's step alone. Remove
        # when vLLM's V1 runner shares the plain layer, as Model Runner V2 does.
        inner_model: Any = getattr(self.host.model, "model", None)
        embedding = getattr(inner_model, "embed_tokens", None)
        if isinstance(embedding, BaseLayerWithLoRA):
            inner_model.embed_tokens = embedding.base_layer

    def _propose_with_own_lengths(
        self, *args: Any, common_attn_metadata: Any, **kwargs: Any
    ) -> torch.Tensor:
        # vLLM counts in place, and may have the lengths and their upper bound in one tensor, which
        # it then counts twice. Remove `clone` when it does not.
        common = common_attn_metadata.replace(
            seq_lens=common_attn_metadata.seq_lens.clone(),
            seq_lens_cpu_upper_bound=common_attn_metadata.seq_lens_cpu_upper_bound.clone(),
        )
        return self._propose(*args, common_attn_metadata=common, **kwargs)

    def price(self, runner: Any) -> str | None:
        if self.is_model and self.host.supports_mm_inputs:
            raise NotImplementedError(
                "token_recycling does not support a trunk by a head that reads images; leave it out"
            )
        return super().price(runner)

    @torch.inference_mode()
    def measure_drafting(self) -> str:
        if not self.is_model:
            return ""
        batches = sorted({load.requests for load in self.curve.loads})
        forwards = from_first_rank({num_reqs: self._time_forward(num_reqs) for num_reqs in batches})
        # The first forward reads the step, whether more of them follow or not.
        reading = min(forwards.values())
        costs = self.add_rounds(lambda num_reqs: self.length * forwards[num_reqs] - reading)
        return f"; a trunk takes, in parts of a step, {costs}"

    def _time_forward(self, num_reqs: int) -> float:
        """The shortest time of a forward that chooses."""
        proposer = self.host

        def run() -> None:
            proposer.dummy_run(num_reqs, use_cudagraphs=False, is_graph_capturing=True)
            proposer.model.compute_logits(proposer.hidden_states[:num_reqs])

        return shortest(run)

    def describe(self) -> str:
        method = self.vllm_config.speculative_config.method
        return f"trunks of at most {self.length} tokens by vLLM's {method}; {super().describe()}"
