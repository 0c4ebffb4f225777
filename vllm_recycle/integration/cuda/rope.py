"""M-RoPE on Model Runner V2: positions of several dimensions, of the rows of trees."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.mm.rope import RopeState


class TreeRopeState(RopeState):
    """vLLM's positions, which are a chain's, each moved as far as its row was moved to its depth.

    To be put in the place of the class of vLLM's state.

    Attributes:
        shifts: int64 [tokens], of the rows of the next step, set by the runner; None where none
            were moved.

    """

    shifts: torch.Tensor | None = None

    def prepare_positions(self, *args: Any, **kwargs: Any) -> None:
        super().prepare_positions(*args, **kwargs)
        if self.shifts is not None:
            self.positions[:, : len(self.shifts)] += self.shifts
            self.shifts = None
