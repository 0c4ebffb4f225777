"""The one price: the time of a step by its rows, and how many nodes it pays to verify."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

# Requests of a step, 0 for any number, and the length of their contexts.
Load = tuple[int, int]
ANY = (0, 0)


# What the drafts of a step are, which says what its rows cost: where all are chains, positions are
# right as they are, no KV moves, and attention may be vLLM's.
TREES, CHAINS = "trees", "chains"


class StepTimes:
    """The time of a step by the number of its rows, in units of its time without drafts.

    A row costs more where it is another request's: attention shares nothing between requests.

    Attributes:
        loads: that there are times for, ascending.
        times: float64 [loads, rows + 1], never falling.
        seconds: of each load, what its unit is in seconds; 1 where nobody knows.

    """

    def __init__(
        self, times: Mapping[Load, np.ndarray], seconds: Mapping[Load, float] | None = None
    ) -> None:
        """Take times as they are: by load, float64 [rows + 1], for 0, 1, ... rows."""
        self.loads = tuple(sorted(times))
        self.seconds = tuple((seconds or {}).get(load, 1.0) for load in self.loads)
        rising = [np.maximum.accumulate(np.float64(times[load])) for load in self.loads]
        self.times = torch.from_numpy(np.stack(rising))
        self._known: dict[Load, torch.Tensor] = {}  # by load and requests
        self._nearest: dict[int, list[int]] = {}  # loads by requests

    @classmethod
    def linear(cls, row_cost: float, max_rows: int) -> StepTimes:
        """Every row beyond the first costs the same part of a step of one row."""
        return cls({ANY: 1.0 + row_cost * np.maximum(np.arange(max_rows + 1) - 1, 0)})

    @classmethod
    def measured(cls, points: Mapping[Load, Mapping[int, float]], max_rows: int) -> StepTimes:
        """Between rows that were measured, and beyond them, times lie on straight lines.

        `points` are, by load, at least two times by number of rows, the fewest without drafts: the
        unit, also where more rows were measured to take less.
        """
        rows = np.arange(max_rows + 1)
        times, seconds = {}, {}
        for load, of_rows in points.items():
            known, values = map(np.asarray, zip(*sorted(of_rows.items()), strict=True))
            seconds[load] = float(values[0])
            values = _rising(values)
            slopes = (values[-1] - values[[-2, 0]]) / (known[-1] - known[[-2, 0]])
            # Not flatter than on average: two noisy times must not make all that is beyond free.
            beyond = values[-1] + slopes.max() * np.maximum(rows - known[-1], 0)
            inside = np.interp(rows, known, values)
            times[load] = np.where(rows > known[-1], beyond, inside) / seconds[load]
        return cls(times, seconds)

    def scaled(self, factors: np.ndarray) -> StepTimes:
        """These times by factors, float64 [loads, rows + 1]; plain steps remain the unit."""
        times, seconds = {}, {}
        for index, (load, factor) in enumerate(zip(self.loads, factors, strict=True)):
            of_plain = factor[max(1, load[0])]
            times[load] = self.times[index].numpy() * factor / of_plain
            seconds[load] = self.seconds[index] * of_plain
        return StepTimes(times, seconds)

    @property
    def max_rows(self) -> int:
        return self.times.shape[1] - 1

    def nearest(self, num_reqs: int, context: float) -> int:
        """The nearest load: by the ratio of requests, then by the length of context."""
        if (known := self._nearest.get(num_reqs)) is None:
            ratios = [abs(math.log((of or num_reqs) / num_reqs)) for of, _ in self.loads]
            known = [index for index, ratio in enumerate(ratios) if ratio == min(ratios)]
            self._nearest[num_reqs] = known
        return min(known, key=lambda index: abs(self.loads[index][1] - context))

    def at(self, num_reqs: int, context: float) -> torch.Tensor:
        """The times at the nearest load, float64 [rows + 1].

        A row costs what it does there behind as many rows of drafts.
        """
        index = self.nearest(num_reqs, context)
        if (index, num_reqs) not in self._known:
            fewer = (self.loads[index][0] or num_reqs) - num_reqs
            self._known[index, num_reqs] = _moved(self.times[index], fewer)
        return self._known[index, num_reqs]

    def of_each(self, num_reqs: int, context: float) -> torch.Tensor:
        """As `at`, but by the rows of one request, where each of them has as many."""
        return self.at(num_reqs, context)[::num_reqs].contiguous()


def _moved(values: torch.Tensor, rows: int) -> torch.Tensor:
    """`values` of so many rows more; of fewer, if negative, with the first one before them."""
    return values[rows:] if rows >= 0 else torch.cat((values[:1].expand(-rows), values))


def choose(worths: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, float]:
    """How many nodes of each request a step verifies, for the most expected tokens by its time.

    Each request has a prefix of its own. A prefix grows by blocks: the next nodes with the highest
    worth on average, so that a node which is worth little does not hide a better one behind it.
    Blocks of all requests are taken, the best first, as long as the rate of the step rises. Where
    no node is worth more than the one before it, as in a grown tree, no other choice is better.

    Args:
        worths: floating [batch, nodes], the chance that each node is accepted; 0 for none.
        times: float64 [rows + 1], the time of a step by its rows, never falling.

    Returns:
        int64 [batch]; of equally good choices the one with the fewest nodes, of equal blocks those
        of the first request. And the rate of the step, expected tokens by its time.

    """
    blocks = [
        (-worth / size, b, size, worth)
        for b, row in enumerate(worths.tolist())
        for worth, size in _blocks(row)
    ]
    blocks.sort(key=lambda block: block[:2])
    rows, last = len(worths), len(times) - 1
    total = float(rows)
    best, num_taken = total / float(times[min(rows, last)]), 0
    for taken, (_, _, size, worth) in enumerate(blocks, start=1):
        total, rows = total + worth, rows + size
        if rows > last:
            break
        if total / float(times[rows]) > best:
            best, num_taken = total / float(times[rows]), taken
    counts = torch.zeros(len(worths), dtype=torch.int64)
    for _, b, size, _ in blocks[:num_taken]:
        counts[b] += size
    return counts, best


def _blocks(worths: list[float]) -> list[tuple[float, int]]:
    """Worth and size of blocks of nodes, none with a higher average than the one before it."""
    blocks: list[tuple[float, int]] = []
    for node in worths:
        worth, size = node, 1
        while blocks and blocks[-1][0] * size < worth * blocks[-1][1]:
            worth, size = blocks[-1][0] + worth, blocks[-1][1] + size
            blocks.pop()
        blocks.append((worth, size))
    return blocks


def _rising(values: np.ndarray) -> np.ndarray:
    """The nearest values, by squares, that never fall: what falls is averaged (isotonic)."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([float(value)])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return np.concatenate([np.full(len(block), np.mean(block)) for block in blocks])


def least_slopes(times: Sequence[float]) -> list[float]:
    """For each number of rows, the least slope to any larger one; infinite for the largest.

    It is the slope to the next corner of the lower hull of all that come behind.
    """
    hull, slopes = [len(times) - 1], [math.inf] * len(times)

    def slope(first: int, second: int) -> float:
        return (times[second] - times[first]) / (second - first)

    for row in range(len(times) - 2, -1, -1):
        while len(hull) > 1 and slope(row, hull[-1]) >= slope(hull[-1], hull[-2]):
            hull.pop()
        slopes[row] = slope(row, hull[-1])
        hull.append(row)
    return slopes
