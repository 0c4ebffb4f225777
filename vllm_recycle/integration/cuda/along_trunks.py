"""Token Recycling along trunks, whatever drafts these, on Model Runner V2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.trunk import ChoiceAcceptance
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cuda.token_recycling import TokenRecyclingV2Drafter
from vllm_recycle.kernels.triton.trunks import DeviceTrunks


class AlongTrunks(TokenRecyclingV2Drafter):
    """Grows trees along trunks, which a speculator drafts.

    Args:
        vllm_config, device, req_states: as for any drafter.
        length: the most tokens of a trunk.

    Attributes:
        length: the most tokens of a trunk that has a place in a tree.
        choices: what the choices of a trunk are worth.
        last_trunks: the last trunk of each request.

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
        self.last_trunks = DeviceTrunks.empty(max_num_reqs, self.length, self.choices)
        self.trunks = Trunks(self.last_trunks.token_ids, self.last_trunks.chances)

    def add_requests(self, requests: Sequence[NewRequest]) -> None:
        super().add_requests(requests)
        indices = [request.req_state_idx for request in requests]
        self.leave_out(async_tensor_h2d(indices, device=self.device))

    def leave_out(self, idx_mapping: torch.Tensor) -> None:
        """Some requests, int64 [n], have no trunk."""
        self.last_trunks.token_ids.index_fill_(0, idx_mapping.long(), NO_TOKEN)

    def take_trunks(self, idx_mapping: torch.Tensor, trunks: Trunks) -> None:
        """Take in trunks behind some texts, int64 [batch], with probabilities for chances."""
        self.last_trunks.take(idx_mapping, self.texts, trunks)

    def count_trunks(self, idx_mapping: torch.Tensor) -> None:
        """Count what followed the last trunks of some requests, int64 [batch]."""
        if not self.options.isolates:  # else nobody's counts reach another
            self.last_trunks.count(idx_mapping, self.texts)
