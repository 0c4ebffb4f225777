"""How often a draft from a row is right, counted while serving.

A count is kept for each length of context, for own and shared rows, for each rank, and for each
steadiness of the row. It is taken at every row that the walk visits, of all ranks of the row that a
draft would be made from there: the sampled token says which was right, drafted or not. So counts
are not bent by what was chosen to be drafted, and a step without drafts teaches as well.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

import torch

from vllm_recycle.core.adjacency import MAX_STEADINESS, MatrixLayout

ANY_STEADINESS = MAX_STEADINESS + 1
# Where a count of all is above this, both its numbers are halved: what is old counts less.
MOST_SEEN = 2000.0
# A steadiness that was hardly seen is taken to be like all of its rank.
PRIOR_WEIGHT = 4.0
# What the shipped counts weigh beside those of this engine.
MOST_SHIPPED = 200.0


class AcceptanceTable:
    """The counts of an engine.

    Args:
        layout: of the rows.
        device: where the counts live.

    Attributes:
        counts: float64 [contexts, 2 (shared, own), k, 5, 2]: of each steadiness, and of all, how
            often the successor at that rank was right, and how often it was seen.

    """

    def __init__(self, layout: MatrixLayout, *, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        shape = (len(layout.contexts), 2, layout.k, ANY_STEADINESS + 1, 2)
        self.counts = torch.empty(shape, dtype=torch.float64, device=device)
        self.clear()

    def clear(self) -> None:
        """Forget everything but the shipped counts, which were measured on a chat model."""
        shipped = _shipped_counts()
        for index, length in enumerate(self.layout.contexts):
            # Of a length that was not measured, the counts of the longest one below it.
            known = shipped[max(one for one in shipped if one <= length)]
            last = known.shape[1] - 1
            ranks = torch.arange(self.layout.k).clamp(max=last)
            self.counts[index] = known[:, ranks]

    def rates(self) -> torch.Tensor:
        """float64 [contexts, 2, k, 4], the chance that a successor is right."""
        right, seen = self.counts[..., 0], self.counts[..., 1]
        of_all = right[..., -1:] / seen[..., -1:].clamp(min=1)
        return (right[..., :-1] + PRIOR_WEIGHT * of_all) / (seen[..., :-1] + PRIOR_WEIGHT)


@cache
def _shipped_counts() -> dict[int, torch.Tensor]:
    """By length of context, float64 [2, k, 5, 2]."""
    text = resources.files(__package__).joinpath("acceptance.json").read_text("utf-8")
    counts = {
        int(length): torch.tensor(values, dtype=torch.float64)
        for length, values in json.loads(text)["contexts"].items()
    }
    for values in counts.values():
        seen = values[..., 1:]
        values *= MOST_SHIPPED / seen.clamp(min=MOST_SHIPPED)
    return counts
