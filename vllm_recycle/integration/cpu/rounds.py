"""Of which requests the draft model's round is worth its time, on the V1 runner."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from vllm_recycle.integration.drafter import from_first_rank

# The part of a new sample that an average takes; rounds of as many requests between corrections of
# what their forwards take; and how fine rates are told apart, in parts of a doubling.
GAIN, CORRECT_EVERY, FINE = 1 / 16, 8, 4
# Steps that go without a round, until one is made to see what it gives: so many times what it must
# read, in steps, which is never more than the second.
LOOK_EVERY, MOST_READING = 32, 32
# What rounds are believed to give before any was made, in parts of what a step without one does,
# and of how many that would be the average: one that gave little must not end all.
AT_FIRST, AS_MANY = 1.25, 3


class Rounds:
    """What rounds take, and what they give; a rate is in tokens by the time of a plain step.

    Args:
        units: seconds of a step without drafts, by its requests.
        forwards: seconds of a draft forward, by the requests that draft in it.
        reading: seconds in which the draft model reads a token of a short prompt.

    """

    def __init__(
        self, units: Mapping[int, float], forwards: Mapping[int, float], reading: float
    ) -> None:
        # These, and what was measured while serving: forwards with how many that is the average of.
        self._units = {_size(num_reqs): seconds for num_reqs, seconds in units.items()}
        self._forwards = {_size(num_reqs): seconds for num_reqs, seconds in forwards.items()}
        self._reading = reading
        self._served_units: dict[int, float] = {}
        self._served_forwards: dict[int, tuple[float, int]] = {}
        # By the sizes of a step and of a round, and by what the step is worth without one: what a
        # round gave, and how many that is the average of, the believed ones included.
        self._promises: defaultdict[tuple[int, int], dict[int, tuple[float, int]]]
        self._promises = defaultdict(dict)
        self._num_left_out = 0
        # Tokens of an answer, up to where it was interrupted, and of how many that is the average.
        self._length: tuple[float, int] = (0.0, 0)

    def cost(self, num_reqs: int, num_drafting: int) -> float:
        """What a forward for some requests costs, in parts of a step of all without drafts."""
        return _nearest(self._forwards, num_drafting) / _nearest(self._units, num_reqs)

    def choose(self, alone: float, behind: np.ndarray, left: np.ndarray) -> np.ndarray:
        """For which requests of a step a round is made, bool [batch].

        Args:
            alone: the rate of the step without a round.
            behind: int64 [batch], tokens that the draft model must read beside those that a round
                takes in anyway.
            left: int64 [batch], tokens that each may have still, 0 where nothing is drafted. More
                than an answer has on average are not expected.

        """
        num_reqs, may_draft = len(left), left > 0
        promise, _ = self._promise(num_reqs, int(may_draft.sum()), alone)
        gain = np.minimum(left, self._length[0] or math.inf) * (1 / alone - 1 / promise)
        reading = behind * (self._reading / _nearest(self._units, num_reqs))
        chosen = may_draft & (gain > reading)
        if chosen.any() and self._promise(num_reqs, int(chosen.sum()), alone)[0] > alone:
            return chosen
        self._num_left_out += 1
        to_read = reading[may_draft].sum()
        if to_read > MOST_READING or self._num_left_out < LOOK_EVERY * max(1.0, to_read):
            return np.zeros_like(may_draft)
        self._num_left_out = 0
        return may_draft

    def least_chance(self, num_reqs: int, num_drafting: int, alone: float) -> float:
        """What a forward for some requests of a step costs in tokens; see `draft_trunks`."""
        promise, _ = self._promise(num_reqs, num_drafting, alone)
        return self.cost(num_reqs, num_drafting) * max(alone, promise)

    def gave(
        self, num_reqs: int, num_drafting: int, alone: float, rate: float, seconds: float | None
    ) -> None:
        """Take in a round for some requests of a step, and the rate of the step with it.

        A forward took so many seconds, None where one had prompts to read.
        """
        promise = self._promise(num_reqs, num_drafting, alone)
        of_all, of_drafting = _size(num_reqs), _size(num_drafting)
        self._promises[of_all, of_drafting][_worth(num_reqs, alone)] = _taken_in(promise, rate)
        if seconds is None:
            return
        before = self._served_forwards.get(of_drafting, (seconds, 0))
        average, samples = self._served_forwards[of_drafting] = _taken_in(before, seconds)
        if samples % CORRECT_EVERY == 0 and of_all in self._served_units:
            measured = average, self._served_units[of_all]
            self._forwards[of_drafting], self._units[of_all] = from_first_rank(measured)

    def served(self, num_reqs: int, unit: float) -> None:
        """Take in a step, by which one without drafts takes so many seconds."""
        size = _size(num_reqs)
        self._served_units[size] = _moved(self._served_units.get(size, unit), unit)

    def ended(self, length: int) -> None:
        """Take in an answer of so many tokens, or what there was of it when it was interrupted."""
        self._length = _taken_in(self._length, length)

    def _promise(self, num_reqs: int, num_drafting: int, alone: float) -> tuple[float, int]:
        """The rate of a step with a round, and of how many rounds that is the average."""
        sizes, worth = (_size(num_reqs), _size(num_drafting)), _worth(num_reqs, alone)
        known = self._promises[sizes]
        if worth in known:
            return known[worth]
        at_first = AT_FIRST * alone
        if num_drafting < num_reqs:
            of_all, _ = self._promise(num_reqs, num_reqs, alone)
            at_first = alone + (of_all - alone) * num_drafting / num_reqs
        if not known:
            return at_first, AS_MANY
        # A round gives no more, in parts, than where a step without one gives less, and no less
        # than where one gives more.
        nearest = max((other for other in known if other < worth), default=min(known))
        promise = known[nearest][0] * 2 ** ((worth - nearest) / FINE)
        return promise if nearest < worth else math.sqrt(promise * at_first), AS_MANY


def _nearest(costs: Mapping[int, float], num_reqs: int) -> float:
    size = _size(num_reqs)
    return costs[min(costs, key=lambda known: (abs(known - size), known))]


def _size(num_reqs: int) -> int:
    """What tells numbers of requests apart."""
    return num_reqs.bit_length()


def _worth(num_reqs: int, alone: float) -> int:
    """What tells rates of a step without a round apart."""
    return round(FINE * math.log2(alone / num_reqs))


def _taken_in(average: tuple[float, int], sample: float) -> tuple[float, int]:
    """An average and its number of samples, with one more."""
    value, samples = average
    return _moved(value, sample, max(GAIN, 1 / (samples + 1))), samples + 1


def _moved(average: float, sample: float, gain: float = GAIN) -> float:
    return average + gain * (sample - average)
