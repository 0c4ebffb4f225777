"""What the drafters of Token Recycling share, whatever the runner."""

from __future__ import annotations

from collections.abc import Collection

from vllm_recycle.core.copies import Copies
from vllm_recycle.core.token_recycling import TokenRecyclingState
from vllm_recycle.core.trunk import ChoiceAcceptance
from vllm_recycle.integration.drafter import Drafter
from vllm_recycle.integration.options import TokenRecyclingOptions


class TokenRecyclingDrafter(Drafter):
    """Learns into the adjacency matrix, and what the choices of trunks are worth; a mixin.

    Attributes:
        choices: of trunks; None where trees grow along none.
        copies: from the text of each request; None where nothing grows along them.

    """

    options: TokenRecyclingOptions
    state: TokenRecyclingState
    choices: ChoiceAcceptance | None = None
    copies: Copies | None = None

    @property
    def trunk_acceptances(self) -> list[ChoiceAcceptance]:
        """What trunks are worth, by what drafts them."""
        acceptances = [] if self.choices is None else [self.choices]
        return acceptances if self.copies is None else [*acceptances, self.copies.acceptance]

    def reset(self) -> None:
        super().reset()
        for acceptance in self.trunk_acceptances:
            acceptance.clear()

    def weights_changed(self) -> None:
        super().weights_changed()
        self.state.acceptance.halve()
        for acceptance in self.trunk_acceptances:
            acceptance.halve()

    def forget(self, owners: Collection[str | int]) -> int:
        return self.state.matrix.forget(owners)
