"""Token Recycling along trunks, whatever drafts these, on Model Runner V2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.trunk import CHOICES, ChoiceAcceptance
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cuda.token_recycling import TokenRecyclingV2Drafter


class AlongTrunks(TokenRecyclingV2Drafter):
    """Grows trees along trunks, which a speculator drafts.

    Args:
        vllm_config, device, req_states: as for any drafter.
        length: the most tokens of a trunk.

    Attributes:
        length: the most tokens of a trunk that has a place in a tree.
        choices: what the choices of a trunk are worth.
        trunks: of each request the last one, by `req_state_idx`.
        probabilities: float32 [max_num_reqs, length, CHOICES], that a model gave its choices.
        lengths: int64 [max_num_reqs], of the text that each was drafted behind.

    """

    trunks: Trunks

    def __init__(
        self, vllm_config: Any, device: torch.device, req_states: Any, *, length: int
    ) -> None:
        super().__init__(vllm_config, device, req_states)
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.length = min(length, self.trees.depth)
        self.choices = ChoiceAcceptance(device)
        shape = max_num_reqs, self.length, CHOICES
        self.probabilities = torch.zeros(shape, device=device)
        token_ids = torch.full(shape, NO_TOKEN, device=device)
        self.trunks = Trunks(token_ids, torch.zeros_like(self.probabilities))
        self.lengths = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.places = torch.arange(self.length, device=device)

    def reset(self) -> None:
        super().reset()
        self.choices.clear()

    def begin(
        self,
        req_state_indices: Sequence[int],
        texts: Sequence[Sequence[int]],
        classes: Sequence[int],
    ) -> None:
        super().begin(req_state_indices, texts, classes)
        self.leave_out(async_tensor_h2d([*req_state_indices], device=self.device))

    def leave_out(self, idx_mapping: torch.Tensor) -> None:
        """Some requests, int64 [n], have no trunk."""
        self.trunks.token_ids[idx_mapping] = NO_TOKEN

    def take_trunks(self, idx_mapping: torch.Tensor, drafted: Trunks) -> None:
        """Take in trunks behind some texts, int64 [batch], with probabilities for chances."""
        self.lengths[idx_mapping] = self.texts.lengths[idx_mapping].long()
        self.trunks.token_ids[idx_mapping] = drafted.token_ids
        self.probabilities[idx_mapping] = drafted.chances
        self.trunks.chances[idx_mapping] = self.choices.chances(drafted).chances

    def count_trunks(self, idx_mapping: torch.Tensor) -> None:
        """Count what followed the last trunks of some requests, int64 [batch]."""
        if self.options.isolates:  # nobody's counts reach another
            return
        texts, lengths = self.texts
        place = self.lengths[idx_mapping][:, None] + self.places
        is_text = place < lengths[idx_mapping][:, None]
        follows = texts[idx_mapping[:, None], place.clamp(max=texts.shape[1] - 1)].long()
        before = (self.trunks.token_ids[idx_mapping], self.probabilities[idx_mapping])
        self.choices.count(Trunks(*before), follows.where(is_text, NO_TOKEN))

    def statistics(self) -> dict[str, float]:
        return super().statistics() | {"rounds": self.num_rounds}
