"""The seconds of a step without prompts: by the kind of its drafts, its load and its rows.

A curve is filled at start-up, by timed steps (`MeasuredCurve`) or by replayed CUDA graphs
(`graph_curve`). Served steps correct it, since a machine may be busy at start-up, and may change.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

# Kinds of drafts. Chains need no attention of trees, and no KV moves. A trunk is a draft model's.
TREES, CHAINS, TRUNKS = "trees", "chains", "trees along trunks"
# Rows per request that have a correction of their own: 1, 2, 4, ...
NUM_PLACES = 7
# The part of its error that a step corrects, and the largest error that is believed (logarithms).
GAIN, MOST = 1 / 8, 0.25
# How a step with drafts corrects other rows of drafts: by a part of its correction, since most of
# an error is the machine's; and towards the correction of its own rows by a part of the difference,
# so that rows which once were slow are tried again.
SHARED, ALIGNED = 1 / 2, 1 / 512
# Entries of the cache of `at`.
MAX_CACHED = 4096
# The most that a shorter time is believed at once (logarithm).
MOST_AT_ONCE = 1.0
# Steps are taken in together: code that runs once per step is not in the CPU's caches.
TAKE_IN_EVERY = 16


class Load(NamedTuple):
    """What a step has beside its drafts.

    Attributes:
        requests: of the step.
        context: tokens before each request's rows, on average.
        drafting: requests that have a draft; 0 means that all have one.

    """

    requests: int
    context: float = 0.0
    drafting: int = 0


class Curve(ABC):
    """The seconds of a step, as measured and corrected.

    Attributes:
        kinds: of drafts that were measured.
        logs: by kind and cell of loads, and then place: how much longer steps take than was
            measured, as a natural logarithm. Cells where no step was served have none.

    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = tuple(kinds)
        self.logs: dict[tuple[str, Hashable], list[float]] = {}
        self._samples: list[tuple[str | None, Load, int, float, bool]] = []
        self._cache: dict[tuple[str, Hashable, tuple[int, ...]], list[float]] = {}  # of `at`

    @abstractmethod
    def cell(self, load: Load) -> Hashable:
        """Loads of one cell share their corrections."""

    @abstractmethod
    def measured(self, kind: str, load: Load, rows: np.ndarray) -> np.ndarray:
        """Seconds as they were measured, float64, by rows of all requests; infinite if unknown."""

    def key(self, load: Load) -> Hashable:
        """Loads of one key have the same seconds."""
        return load

    def kinds_of(self, kind: str | None) -> tuple[str, ...]:
        """The kinds that drafts are of: one, or if None is known any without a model's round."""
        kinds = (kind,) if kind else tuple(name for name in self.kinds if name != TRUNKS)
        return kinds or self.kinds

    def at(self, kind: str, load: Load, rows: tuple[int, ...]) -> list[float]:
        """Seconds of steps with so many rows each; infinite if unknown."""
        key = kind, self.key(load), rows
        if (seconds := self._cache.get(key)) is None:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            seconds = self._cache[key] = self._corrected(kind, load, np.array(rows)).tolist()
        return seconds

    def plain(self, load: Load) -> float:
        """Seconds of a step without drafts."""
        return self.at(self.kinds[0], load, (load.requests,))[0]

    def _corrected(self, kind: str, load: Load, rows: np.ndarray) -> np.ndarray:
        seconds = self.measured(kind, load, rows)
        logs = self.logs.get((kind, self.cell(load)))
        if logs is None:
            return seconds
        places = np.log2(np.maximum(rows / load.requests, 1.0))
        return seconds * np.exp(np.interp(places, range(NUM_PLACES), logs))

    def serve(
        self, kind: str | None, load: Load, rows: int, seconds: float, *, is_look: bool = False
    ) -> None:
        """Take in a step without prompts.

        Args:
            kind: of its drafts; None if they may be of any kind, or there were none.
            load: of the step.
            rows: of all requests.
            seconds: that it took.
            is_look: whether it was a look: a shorter time is then believed at once, since whatever
                disturbs a step lengthens it.

        """
        self._samples.append((kind, load, rows, seconds, is_look))
        if len(self._samples) == TAKE_IN_EVERY:
            self.take_in()

    def take_in(self) -> None:
        """Correct the curve by the steps that were served since the last time."""
        for sample in self._samples:
            self._correct(*sample)
        self._samples.clear()
        self._cache.clear()

    def _correct(
        self, kind: str | None, load: Load, rows: int, seconds: float, is_look: bool
    ) -> None:
        cell, drafts = self.cell(load), rows > load.requests
        position = min(math.log2(rows / load.requests), NUM_PLACES - 1)
        first_place, part = int(position), position % 1
        weights = {first_place: 1.0 - part, first_place + 1: part} if part else {first_place: 1.0}
        square = sum(weight * weight for weight in weights.values())
        kinds = self.kinds_of(kind)
        for draft_kind in kinds if drafts else kinds[:1]:
            [measured] = self.measured(draft_kind, load, np.array([rows])).tolist()
            if not math.isfinite(measured):
                continue
            logs = self._logs_of(draft_kind, cell)
            log = sum(weight * logs[place] for place, weight in weights.items())
            error = math.log(seconds / measured) - log
            if is_look:
                step = max(-MOST_AT_ONCE, min(MOST / 2, error))
            else:
                step = GAIN * max(-MOST, min(MOST, error))
            if not drafts:
                logs[0] += step
                continue
            draft_weight = 1.0 - weights.get(0, 0.0)  # place 0 is that of plain steps
            for place in range(1, NUM_PLACES):
                if place in weights:
                    logs[place] += step * weights[place] / square
                else:
                    logs[place] += draft_weight * (SHARED * step + ALIGNED * (log - logs[place]))
        if not drafts:  # then all kinds are one
            for draft_kind in self.kinds:
                self._logs_of(draft_kind, cell)[0] = self._logs_of(kinds[0], cell)[0]

    def _logs_of(self, kind: str, cell: Hashable, log: float = 0.0) -> list[float]:
        return self.logs.setdefault((kind, cell), [log] * NUM_PLACES)

    def set_plain(self, load: Load, seconds: float) -> None:
        """Believe that a step without drafts takes so long; at first, drafts by as much longer."""
        self.take_in()
        [measured] = self.measured(self.kinds[0], load, np.array([load.requests])).tolist()
        log = math.log(seconds / measured)
        for kind in self.kinds:
            self._logs_of(kind, self.cell(load), log)[0] = log


class MeasuredCurve(Curve):
    """A curve of steps that were timed with a few numbers of rows, at a few loads.

    A step takes what it does at the nearest load behind as many rows of drafts. A row costs more
    where it is another request's: attention shares nothing between requests.

    Args:
        points: by kind and load, seconds by rows of all requests, at least two; the fewest rows
            are those without drafts. The same loads for each kind.
        max_rows: the most of a step.

    """

    def __init__(
        self, points: Mapping[str, Mapping[tuple[int, int], Mapping[int, float]]], max_rows: int
    ) -> None:
        super().__init__([*points])
        [loads, *_] = [sorted(kind_points) for kind_points in points.values()]
        self.loads = [Load(*load) for load in loads]
        self.max_rows = max_rows
        self._seconds = {
            kind: [_on_lines(kind_points[load], max_rows) for load in loads]
            for kind, kind_points in points.items()
        }
        self._rows = np.arange(max_rows + 1)
        self._seconds_by_rows: dict[tuple[str, Hashable], torch.Tensor] = {}
        self._nearest: dict[int, list[int]] = {}  # loads by requests

    @classmethod
    def linear(cls, row_cost: float, max_rows: int, kinds: Sequence[str]) -> MeasuredCurve:
        """Every row beyond the first costs the same part of a step of one row, at any load."""
        points = {1: 1.0, max_rows + 1: 1.0 + row_cost * max_rows}
        return cls({kind: {(0, 0): points} for kind in kinds}, max_rows)

    def add_trunks(self, round_seconds: Callable[[int], float]) -> None:
        """Add the kind of trees along trunks: trees, and a round by the requests of a load."""
        self.kinds = (*self.kinds, TRUNKS)
        pairs = zip(self._seconds[self.kinds[0]], self.loads, strict=True)
        self._seconds[TRUNKS] = [seconds + round_seconds(load.requests) for seconds, load in pairs]

    def cell(self, load: Load) -> int:
        """The nearest load: by the ratio of requests, then by the length of context."""
        num_reqs = load.requests
        if (cells := self._nearest.get(num_reqs)) is None:
            ratios = [abs(math.log((peer.requests or num_reqs) / num_reqs)) for peer in self.loads]
            cells = [index for index, ratio in enumerate(ratios) if ratio == min(ratios)]
            self._nearest[num_reqs] = cells
        return min(cells, key=lambda index: abs(self.loads[index].context - load.context))

    def key(self, load: Load) -> Hashable:
        return self.cell(load), load.requests

    def measured(self, kind: str, load: Load, rows: np.ndarray) -> np.ndarray:
        cell = self.cell(load)
        seconds = self._seconds[kind][cell]
        extra_rows = (self.loads[cell].requests or load.requests) - load.requests
        return seconds[np.clip(rows + extra_rows, 0, self.max_rows)]

    def by_rows(self, kind: str, load: Load) -> torch.Tensor:
        """Seconds of a step by its rows, float64 [rows + 1], never falling."""
        key = kind, self.key(load)
        if key not in self._seconds_by_rows:
            rising_seconds = np.maximum.accumulate(self._corrected(kind, load, self._rows))
            self._seconds_by_rows[key] = torch.from_numpy(rising_seconds)
        return self._seconds_by_rows[key]

    def take_in(self) -> None:
        super().take_in()
        self._seconds_by_rows.clear()

    def known(self) -> dict[str, float]:
        """How much longer steps take than was measured, by kind, load and rows per request."""
        return {
            f"seconds_by_measured: {kind}, {self._describe(cell)}, {2**place} rows": math.exp(log)
            for (kind, cell), logs in self.logs.items()
            for place, log in enumerate(logs)
            if log
        }

    def _describe(self, cell: Hashable) -> str:
        assert isinstance(cell, int)
        return f"{self.loads[cell].requests} requests, {self.loads[cell].context} tokens"


def _on_lines(points: Mapping[int, float], max_rows: int) -> np.ndarray:
    """Seconds by rows, float64 [rows + 1], on lines between points and beyond them."""
    rows = np.arange(max_rows + 1)
    known_rows, values = map(np.asarray, zip(*sorted(points.items()), strict=True))
    seconds = _rising(values)
    slopes = (seconds[-1] - seconds[[-2, 0]]) / (known_rows[-1] - known_rows[[-2, 0]])
    # Not flatter than on average: two noisy times must not make all that is beyond free.
    extrapolation = seconds[-1] + slopes.max() * np.maximum(rows - known_rows[-1], 0)
    return np.where(rows > known_rows[-1], extrapolation, np.interp(rows, known_rows, seconds))


def _rising(values: np.ndarray) -> np.ndarray:
    """The nearest values, by squares, that never fall: what falls is averaged (isotonic)."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([float(value)])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return np.concatenate([np.full(len(block), np.mean(block)) for block in blocks])
