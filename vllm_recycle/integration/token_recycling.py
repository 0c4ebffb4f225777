"""What the drafters of Token Recycling share, whatever the runner."""

from __future__ import annotations

from collections.abc import Collection

from vllm_recycle.core.token_recycling import TokenRecyclingState
from vllm_recycle.core.trunk import ChoiceAcceptance
from vllm_recycle.integration.drafter import Drafter
from vllm_recycle.integration.options import TokenRecyclingOptions


class TokenRecyclingDrafter(Drafter):
    """Learns into the adjacency matrix, and what the choices of trunks are worth; a mixin.

    Attributes:
        choices: of trunks; None where trees grow along none.

    """

    options: TokenRecyclingOptions
    state: TokenRecyclingState
    choices: ChoiceAcceptance | None = None

    def reset(self) -> None:
        super().reset()
        if self.choices is not None:
            self.choices.clear()

    def weights_changed(self) -> None:
        super().weights_changed()
        self.state.acceptance.halve()
        if self.choices is not None:
            self.choices.halve()

    def forget(self, owners: Collection[str | int]) -> int:
        return self.state.matrix.forget(owners)
