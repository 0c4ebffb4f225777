"""Of which requests the draft model's round is worth its time, on the V1 runner."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from vllm_recycle.integration.drafter import from_first_rank

# The part of a new sample that an average takes; rounds of as many requests between corrections of
# what their forwards take; steps that go without a round, until one is made to see what it gives;
# and how fine rates are told apart, in parts of a doubling.
GAIN, CORRECT_EVERY, LOOK_EVERY, FINE = 1 / 16, 8, 32, 4
# What rounds are believed to give before any was made, in parts of what a step without one does,
# and of how many that would be the average: one that gave little must not end all.
AT_FIRST, AS_MANY = 1.25, 3


class Rounds:
    """What rounds take, in parts of a step without drafts, and what they give.

    Args:
        costs: of a forward, as they are believed, by how many requests draft in it.
        readings: what reading a token of a prompt costs, by how many requests a step has.

    """

    def __init__(self, costs: Mapping[int, float], readings: Mapping[int, float]) -> None:
        self._costs = {_size(num_reqs): cost for num_reqs, cost in costs.items()}
        self._readings = {_size(num_reqs): cost for num_reqs, cost in readings.items()}
        # And how many rounds that is the average of, the believed ones included.
        self._promises: dict[tuple[int, int], tuple[float, int]] = {}
        # By size: seconds of a forward, of how many rounds, and of a step without drafts.
        self._seconds: dict[int, tuple[float, int]] = {}
        self._units: dict[int, float] = {}
        self._num_left_out = 0
        # Tokens of an answer, and of how many that is the average.
        self._length: tuple[float, int] = (0.0, 0)

    def cost(self, num_reqs: int) -> float:
        """What a forward for so many requests costs."""
        return _nearest(self._costs, num_reqs)

    def that_pay(self, alone: float, behind: np.ndarray, left: np.ndarray) -> np.ndarray:
        """Of which requests of a step a round pays, bool [batch].

        Args:
            alone: the tokens of the step without a round, by its time.
            behind: int64 [batch], tokens that the draft model must read first.
            left: int64 [batch], tokens that each may have still, 0 where nothing is drafted. More
                than an answer has on average are not expected.

        """
        num_reqs = len(behind)
        promise, _ = self._promise(num_reqs, alone)
        gain = np.minimum(left, self._length[0] or math.inf) * (1 / alone - 1 / promise)
        reading = behind * _nearest(self._readings, num_reqs)
        pay = (left > 0) & (gain > reading)
        if not pay.any():
            self._num_left_out += 1
            if self._num_left_out >= LOOK_EVERY * max(1.0, reading[left > 0].sum()):
                self._num_left_out, pay = 0, left > 0
        return pay

    def ended(self, length: int) -> None:
        """Take in an answer of so many tokens."""
        self._length = _taken_in(self._length, length)

    def least_chance(self, num_reqs: int, alone: float) -> float:
        """What a forward costs in tokens, where a step without a round gives so many by its time.

        See `draft_trunks`.
        """
        return self.cost(num_reqs) * max(alone, self._promise(num_reqs, alone)[0])

    def gave(self, num_reqs: int, alone: float, rate: float, seconds: float | None) -> None:
        """Take in a round whose forwards took so long, and the rate of the step behind it.

        A rate is in tokens by the time of the step and the round. The `seconds` are None where the
        forwards had prompts to read.
        """
        like, size = _like(num_reqs, alone), _size(num_reqs)
        self._promises[like] = _taken_in(self._promise(num_reqs, alone), rate)
        if seconds is None:
            return
        average, samples = _taken_in(self._seconds.get(size, (seconds, 0)), seconds)
        self._seconds[size] = average, samples
        if samples % CORRECT_EVERY == 0 and size in self._units:
            self._costs[size] = from_first_rank(average / self._units[size])

    def _promise(self, num_reqs: int, alone: float) -> tuple[float, int]:
        size, worth = _like(num_reqs, alone)
        if (size, worth) in self._promises:
            return self._promises[size, worth]
        # A round gives no more, in parts, than where a step without one gives less.
        below = [other for of, other in self._promises if of == size and other < worth]
        if not below:
            return AT_FIRST * alone, AS_MANY
        promise, _ = self._promises[size, max(below)]
        return promise * 2 ** ((worth - max(below)) / FINE), AS_MANY

    def served(self, num_reqs: int, unit: float) -> None:
        """Take in a step, by which one without drafts takes so many seconds."""
        size = _size(num_reqs)
        self._units[size] = _moved(self._units.get(size, unit), unit)


def _nearest(costs: Mapping[int, float], num_reqs: int) -> float:
    size = _size(num_reqs)
    return costs[min(costs, key=lambda known: (abs(known - size), known))]


def _size(num_reqs: int) -> int:
    """What tells numbers of requests apart."""
    return num_reqs.bit_length()


def _like(num_reqs: int, alone: float) -> tuple[int, int]:
    """What steps have in common that a round is expected to give as much to."""
    return _size(num_reqs), round(FINE * math.log2(alone / num_reqs))


def _taken_in(average: tuple[float, int], sample: float) -> tuple[float, int]:
    """An average and its number of samples, with one more."""
    value, samples = average
    return _moved(value, sample, max(GAIN, 1 / (samples + 1))), samples + 1


def _moved(average: float, sample: float, gain: float = GAIN) -> float:
    return average + gain * (sample - average)
