"""Step times that follow the machine: what was measured at start-up, corrected by served steps.

Times of a start-up may be those of a slow phase, or of a machine that was busy otherwise. What a
served step took, in parts of what it was said to take, is averaged by its load and by its rows per
request. Where steps are served, a sample moves an average by little, so that a stall changes
nothing and a change that lasts is followed within some dozen samples. Sizes that nobody chooses are
looked at now and then; there a shorter time is believed at once, since a stall only lengthens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_recycle.core.price import StepTimes

# Rows per request, of which each power of two has an average; between them they lie on lines.
NUM_SIZES = 7
# The part of what is new in a sample that an average takes, and the most that a sample may say, as
# logarithms of factors.
GAIN, MOST = 1 / 8, 0.25
# Steps between corrections, between looks, and until an average is to be looked at again.
CORRECT_EVERY, LOOK_EVERY, STALE = 16, 128, 512


class ServedTimes:
    """Corrects measured times.

    Args:
        measured: at start-up, by what the drafts of a step are; of the same loads.

    Attributes:
        times: what a step takes now, as far as is known.
        logs: by kind, load and size, logarithms of what steps took in parts of what was measured,
            not a number where none was served. The first size is a step without drafts, which is
            the same of all kinds.
        last: as `logs`, which step of all was the last one.
        rows: of a request, on average, when drafts were last chosen by their price.

    """

    rows = 1

    def __init__(self, measured: Mapping[str, StepTimes]) -> None:
        self._measured = dict(measured)
        self.times = dict(measured)
        self._kinds, [self._loads, *_] = list(measured), [of.loads for of in measured.values()]
        self._seconds = [of.times.numpy() * np.array([of.seconds]).T for of in measured.values()]
        [first, *_] = measured.values()
        self._sizes = [_sizes(first, load) for load in range(len(self._loads))]
        self.logs = self._each(math.nan)
        self.last = self._each(-STALE)
        self._asked = self._each(0)  # which look each was asked for last
        self._num_served = self._num_drafts = self._num_looks = 0
        self._samples: list[tuple[str | None, int, int, float, float]] = []

    def serve(
        self, kind: str | None, num_rows: int, *, num_reqs: int, context: float, seconds: float
    ) -> bool:
        """Take in a step without prompts; whether it is time to `correct`.

        Args:
            kind: what its drafts were; None if they might be of any kind, or there were none.
            num_rows: of all requests.
            num_reqs: of the step.
            context: tokens before each request's rows, on average.
            seconds: that it took.

        """
        self._samples.append((kind, num_rows, num_reqs, context, seconds))
        if len(self._samples) < CORRECT_EVERY:
            return False
        # All at once: code that runs once a step is not in the caches, and takes longer.
        for sample in self._samples:
            self._num_served += 1
            self._take_in(*sample)
        self._samples.clear()
        return True

    def _take_in(
        self, kind: str | None, num_rows: int, num_reqs: int, context: float, seconds: float
    ) -> None:
        load, requests = self._load(num_reqs, context)
        # Rows of drafts cost what as many do at the load.
        rows = num_rows - num_reqs + requests
        places = _places(rows / requests)
        moved = [index for index, of in enumerate(self._kinds) if kind in (None, of)]
        for index in moved:
            log = math.log(seconds / self._seconds[index].item(load, rows))
            self._move(self.logs[index][load], self.last[index][load], places, log)
        for averages in (self.logs, self.last):
            for of_kind in averages:
                of_kind[load][0] = averages[moved[-1]][load][0]

    def _move(
        self, logs: list[float], last: list[int], places: list[tuple[int, float]], log: float
    ) -> None:
        """Move the averages at some places of a load towards a sample between them."""
        known = logs
        if any(math.isnan(known[place]) for place, _ in places):
            known = np.interp(np.arange(NUM_SIZES), *_known(logs)).tolist()
        new = log - sum(weight * known[place] for place, weight in places)
        is_stale = self._is_stale(last, places)
        moved = min(MOST / 2, new) if is_stale else GAIN * min(MOST, max(-MOST, new))
        for place, weight in places:
            logs[place] = known[place] + moved * weight / sum(w * w for _, w in places)
            # What is found to be far longer is looked at again.
            if not (is_stale and new > MOST):
                last[place] = self._num_served

    def _is_stale(self, last: list[int], places: list[tuple[int, float]]) -> bool:
        return min(last[place] for place, _ in places) <= self._num_served - STALE

    def _each(self, value: Any) -> list[list[list[Any]]]:
        """A value for each kind, load and size."""
        return [[[value] * NUM_SIZES for _ in self._loads] for _ in self._kinds]

    def correct(self, logs: list[list[list[float]]], last: list[list[list[int]]]) -> None:
        """Believe these, of this rank or of the one whose times count."""
        self.logs, self.last = logs, last
        for index, (kind, measured) in enumerate(self._measured.items()):
            factors = [
                np.exp(np.interp(sizes, *_known(of_load)))
                for sizes, of_load in zip(self._sizes, logs[index], strict=True)
            ]
            self.times[kind] = measured.scaled(np.stack(factors))

    def known(self) -> dict[str, float]:
        """What steps took in parts of what was measured, by kind, requests, context and rows."""
        found = {}
        for (index, load, size), log in np.ndenumerate(np.array(self.logs)):
            if not math.isnan(log):
                requests, context = self._loads[load]
                where = f"{self._kinds[index]}, {requests} requests, {context} tokens"
                found[f"seconds_by_measured: {where}, {2**size} rows"] = math.exp(log)
        return found

    def look_at(self, num_reqs: int, context: float) -> tuple[str | None, int] | None:
        """What the drafts of a step should be to see what that takes now, and the most nodes.

        It is what was not served for long, and of this what was asked for least lately: no drafts,
        or drafts of one kind, as large as those that were chosen, or twice as large. None where all
        of these are known, and mostly; to be called for each step that is drafted for. A step
        without drafts, by which all others are judged, is looked at soon if none was served.
        """
        self._num_drafts += 1
        load, _ = self._load(num_reqs, context)
        is_new = math.isnan(self.logs[0][load][0]) and not self._asked[0][load][0]
        if self._num_drafts % (CORRECT_EVERY if is_new else LOOK_EVERY):
            return None
        stale: list[tuple[int, int, list[tuple[int, float]], str | None, int]] = []
        for index, of in enumerate(self._kinds):
            for size in (1, self.rows, 2 * self.rows):
                places = _places(size)
                if self._is_stale(self.last[index][load], places):
                    asked = min(self._asked[index][load][place] for place, _ in places)
                    stale.append((asked, index, places, None if size == 1 else of, size - 1))
        if not stale:
            return None
        _, index, places, kind, nodes = min(stale, key=lambda one: one[0])
        self._num_looks += 1
        for of_kind in self._asked[index : index + 1] if nodes else self._asked:
            for place, _ in places:
                of_kind[load][place] = self._num_looks
        return kind, nodes

    def _load(self, num_reqs: int, context: float) -> tuple[int, int]:
        """The nearest load, and its requests."""
        load = self._measured[self._kinds[0]].nearest(num_reqs, context)
        return load, self._loads[load][0] or num_reqs


def _places(rows: float) -> list[tuple[int, float]]:
    """Between which averages so many rows per request lie, and the weight of each."""
    size = min(math.log2(rows), NUM_SIZES - 1)
    first, rest = int(size), size - int(size)
    return [(first, 1.0 - rest), (first + 1, rest)] if rest else [(first, 1.0)]


def _sizes(times: StepTimes, load: int) -> np.ndarray:
    """log2 of the rows per request, float64 [rows + 1], of a load."""
    rows = np.maximum(np.arange(times.max_rows + 1), 1) / max(1, times.loads[load][0])
    return np.log2(np.maximum(rows, 1.0))


def _known(logs: list[float]) -> tuple[list[int], list[float]]:
    """Sizes that are known, and their logs; nothing is corrected where there is none."""
    known = [size for size, log in enumerate(logs) if not math.isnan(log)]
    return (known, [logs[size] for size in known]) if known else ([0], [0.0])
