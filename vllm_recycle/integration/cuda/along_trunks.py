"""Token Recycling along trunks, whatever drafts these, on Model Runner V2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.trunk import CHOICES, ChoiceAcceptance
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cuda.token_recycling import TokenRecyclingV2Drafter
from vllm_recycle.kernels.triton.matrix.find import Texts


def tokens_behind(
    texts: Texts, idx_mapping: torch.Tensor, starts: torch.Tensor, count: int
) -> torch.Tensor:
    """The tokens of some texts from a place on, without waiting for the device.

    Args:
        texts: of all requests.
        idx_mapping: int64 [batch], of which requests.
        starts: integer [batch], the place in each text.
        count: tokens of each.

    Returns:
        int32 [batch, count], -1 behind the end of a text.

    """
    places = starts[:, None] + torch.arange(count, device=starts.device)
    last_place = texts.token_ids.shape[1] - 1
    token_ids = texts.token_ids[idx_mapping[:, None], places.clamp(max=last_place)]
    return token_ids.where(places < texts.lengths[idx_mapping, None], NO_TOKEN)


class AlongTrunks(TokenRecyclingV2Drafter):
    """Grows trees along trunks, which a speculator drafts.

    Args:
        vllm_config, device, req_states: as for any drafter.
        length: the most tokens of a trunk.

    Attributes:
        length: the most tokens of a trunk that has a place in a tree.
        choices: what the choices of a trunk are worth.
        trunks: the last trunk of each request, by `req_state_idx`.
        probabilities: float32 [max_num_reqs, length, CHOICES], that a model gave its choices.
        starts: int32 [max_num_reqs], tokens of the text that it was drafted behind.

    """

    choices: ChoiceAcceptance
    trunks: Trunks

    def __init__(
        self, vllm_config: Any, device: torch.device, req_states: Any, *, length: int
    ) -> None:
        super().__init__(vllm_config, device, req_states)
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.length = min(length, self.trees.depth)
        self.choices = ChoiceAcceptance(self.state.matrix.classes)
        shape = max_num_reqs, self.length, CHOICES
        token_ids = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=device)
        self.probabilities = torch.zeros(shape, device=device)
        self.trunks = Trunks(token_ids, torch.zeros_like(self.probabilities))
        self.starts = torch.zeros_like(self.texts.lengths)

    def add_requests(self, requests: Sequence[NewRequest]) -> None:
        super().add_requests(requests)
        indices = [request.req_state_idx for request in requests]
        self.leave_out(async_tensor_h2d(indices, device=self.device))

    def leave_out(self, idx_mapping: torch.Tensor) -> None:
        """Some requests, int64 [n], have no trunk."""
        self.trunks.token_ids.index_fill_(0, idx_mapping.long(), NO_TOKEN)

    def take_trunks(self, idx_mapping: torch.Tensor, trunks: Trunks) -> None:
        """Take in trunks behind some texts, int64 [batch], with probabilities for chances."""
        states = idx_mapping.long()
        chances = self.choices.chances(trunks, states).chances
        values = (*trunks, chances, self.texts.lengths[states])
        tensors = (self.trunks.token_ids, self.probabilities, self.trunks.chances, self.starts)
        for tensor, values_of_batch in zip(tensors, values, strict=True):
            tensor.index_copy_(0, states, values_of_batch)

    def count_trunks(self, idx_mapping: torch.Tensor) -> None:
        """Count what followed the last trunks of some requests, int64 [batch]."""
        if self.options.isolates:  # nobody's counts reach another
            return
        states = idx_mapping.long()
        trunks = Trunks(self.trunks.token_ids[states], self.probabilities[states])
        follows = tokens_behind(self.texts, states, self.starts[states], self.length)
        self.choices.count(trunks, states, follows)
