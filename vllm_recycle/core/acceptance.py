"""How often drafts are right, counted while serving.

`AcceptanceTable` counts for the entries of the adjacency matrix: for each class of requests (greedy
or sampled), for each length of context, for own and shared entries, for each rank, and for each
steadiness.

It counts at every row that the walk visits, for all that would be drafted there, drafted or not. So
counts are not bent by what was chosen to be drafted, and a step without drafts teaches as well.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

import torch

from vllm_recycle.core.adjacency import MAX_STEADINESS, NUM_CLASSES, NUM_COUNTED, MatrixLayout

ANY_STEADINESS = MAX_STEADINESS + 1
# Where something was seen more often, both its numbers are halved: what is old counts less.
MOST_SEEN = 2000.0
# A steadiness that was hardly seen is taken to be like all of its rank.
PRIOR_WEIGHT = 4.0
# What the shipped counts weigh beside those of this engine.
MOST_SHIPPED = 200.0


class AcceptanceTable:
    """The counts of an engine, on the device of its adjacency matrix.

    Attributes:
        counts: float64 [classes, contexts, 2 (shared, own), k, 5, 2]: for each steadiness, and
            for all together, how often the successor at that rank was right, and how often it was
            seen.

    """

    def __init__(self, layout: MatrixLayout, *, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        shape = (NUM_CLASSES, len(layout.contexts), 2, layout.k, ANY_STEADINESS + 1, 2)
        self.counts = torch.empty(shape, dtype=torch.float64, device=device)
        self.clear()

    def clear(self) -> None:
        """Forget everything but the shipped counts, which were measured on a chat model."""
        shipped = _shipped_counts()
        for index, context in enumerate(self.layout.contexts):
            # A length that was not measured has the counts of the longest one below it.
            prior = shipped[max(length for length in shipped if length <= context)]
            ranks = torch.arange(self.layout.k).clamp(max=prior.shape[2] - 1)
            self.counts[:, index] = prior[:, :, ranks].repeat(NUM_CLASSES // len(prior), 1, 1, 1, 1)

    def halve(self) -> None:
        """Let what was counted weigh half as much beside what will be."""
        self.counts[:NUM_COUNTED] *= 0.5

    def rates(self) -> torch.Tensor:
        """See `rates`."""
        return rates(self.counts)


def rates(counts: torch.Tensor) -> torch.Tensor:
    """The chance that a successor is right, float64 [classes, contexts, 2, k, 4]."""
    right, seen = counts[..., 0], counts[..., 1]
    prior_rates = right[..., -1:] / seen[..., -1:].clip(min=1)
    return (right[..., :-1] + PRIOR_WEIGHT * prior_rates) / (seen[..., :-1] + PRIOR_WEIGHT)


@cache
def _shipped_counts() -> dict[int, torch.Tensor]:
    """By length of context, float64 [classes, 2, k, 5, 2]."""
    text = resources.files(__package__).joinpath("acceptance.json").read_text("utf-8")
    counts = {
        int(length): torch.tensor(values, dtype=torch.float64)
        for length, values in json.loads(text)["contexts"].items()
    }
    for values in counts.values():
        seen = values[..., 1:]
        values *= MOST_SHIPPED / seen.clamp(min=MOST_SHIPPED)
    return counts
