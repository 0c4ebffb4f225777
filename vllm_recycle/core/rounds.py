"""For which requests of a step a round of the draft model is worth its time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from vllm_recycle.core.explore import LOOK_AT_ROUNDS_EVERY, MOST_READING

# The part of a new sample that an average takes; the most that a forward takes, in parts of what it
# took: what is beyond is a stall; rounds of one size between corrections of what their forwards
# take; and how fine rates are told apart, in parts of a doubling.
GAIN, MOST, CORRECT_EVERY, FINE = 1 / 16, 2, 8, 4
# What rounds are believed to gain before any was made, and of how many that would be the average:
# one that gave little must not end all.
AT_FIRST, AS_MANY = 1.5, 3


class StepAlone(NamedTuple):
    """A step as it would be without a round.

    Attributes:
        num_reqs: of the step.
        unit: seconds that it would take without drafts.
        rate: expected tokens by that time.

    """

    num_reqs: int
    unit: float
    rate: float


class Rounds:
    """What rounds take, and what they give.

    Args:
        forwards: seconds of a draft forward, by the requests that draft in it.
        reading: seconds in which the draft model reads a token of a short prompt.

    """

    def __init__(self, forwards: Mapping[int, float], reading: float) -> None:
        self._forwards = {_size(num_reqs): seconds for num_reqs, seconds in forwards.items()}
        self._reading = reading
        # Averages of what forwards took while serving, and of how many these are.
        self._served: dict[int, tuple[float, int]] = {}
        # By the requests of a step, and by what it is worth without a round: the factor by which
        # those that draft have more tokens with one, if a forward took no time, and of how many
        # rounds that is the average. Where it is dearer a round has fewer forwards, and gains less.
        self._gained: defaultdict[int, dict[int, tuple[float, int]]] = defaultdict(dict)
        self._num_left_out = 0
        # Tokens of an answer, up to where it was interrupted, and of how many that is the average.
        self._length: tuple[float, int] = (0.0, 0)

    def seconds(self, num_drafting: int) -> float:
        """What a forward takes, by how many requests draft in it."""
        size = _size(num_drafting)
        return self._forwards[min(self._forwards, key=lambda known: (abs(known - size), known))]

    def choose(self, step: StepAlone, behind: np.ndarray, left: np.ndarray) -> np.ndarray:
        """For which requests of a step a round is made, bool [batch].

        Args:
            step: without it.
            behind: int64 [batch], tokens that the draft model must read beside those that a round
                takes in anyway.
            left: int64 [batch], tokens that each may have still, 0 where nothing is drafted;
                of one at least there are some. More than an answer has on average are not expected.

        """
        may_draft = left > 0
        promise = self._promise(step, int(may_draft.sum()))
        gain = np.minimum(left, self._length[0] or math.inf) * (1 / step.rate - 1 / promise)
        reading = behind * (self._reading / step.unit)
        chosen = may_draft & (gain > reading)
        if chosen.any() and self._promise(step, int(chosen.sum())) > step.rate:
            return chosen
        self._num_left_out += 1
        to_read = reading[may_draft].sum()
        if to_read > MOST_READING or self._num_left_out < LOOK_AT_ROUNDS_EVERY * max(1.0, to_read):
            return np.zeros_like(may_draft)
        self._num_left_out = 0
        return may_draft

    def cost(self, step: StepAlone, behind: np.ndarray, depths: np.ndarray) -> float:
        """What a round of one forward takes for requests with depths above 0, in plain steps."""
        num_drafting = int((depths > 0).sum())
        if not num_drafting:
            return 0.0
        return (self.seconds(num_drafting) + self._reading * float(behind.sum())) / step.unit

    def least_chance(self, step: StepAlone, num_drafting: int) -> float:
        """What a forward for some requests of a step costs in tokens; see `draft_trunks`."""
        promise = self._promise(step, num_drafting)
        return self.seconds(num_drafting) / step.unit * max(step.rate, promise)

    def gave(
        self, step: StepAlone, num_drafting: int, *, rate: float, seconds: float | None
    ) -> None:
        """Take in a round for some requests of a step, and the rate of the step with it.

        A forward took so many seconds on the first rank, None where one had prompts to read.
        """
        known, worth = self._gained[_size(step.num_reqs)], _worth(step)
        with_forward = 1.0 + self.seconds(num_drafting) / step.unit
        # It may have had several forwards, but takes no tokens.
        more = max(0.0, rate / step.rate * with_forward - 1.0) * step.num_reqs / num_drafting
        known[worth] = _taken_in(known.get(worth, (self._gain(step), AS_MANY)), 1.0 + more)
        if seconds is None:
            return
        size = _size(num_drafting)
        before = self._served.get(size, (self.seconds(num_drafting), 0))
        average, samples = self._served[size] = _taken_in(before, min(seconds, MOST * before[0]))
        if samples % CORRECT_EVERY == 0:
            self._forwards[size] = average

    def ended(self, length: int) -> None:
        """Take in an answer of so many tokens, or what there was of it when it was interrupted."""
        self._length = _taken_in(self._length, length)

    def _promise(self, step: StepAlone, num_drafting: int) -> float:
        """The rate of a step with a round."""
        more = (self._gain(step) - 1.0) * num_drafting / step.num_reqs
        return step.rate * (1.0 + more) / (1.0 + self.seconds(num_drafting) / step.unit)

    def _gain(self, step: StepAlone) -> float:
        """What a round is believed to gain; see above."""
        known, worth = self._gained[_size(step.num_reqs)], _worth(step)
        if worth in known:
            return known[worth][0]
        if not known:
            return AT_FIRST
        # A round gains no more than where a step without one is worth less, and no less than where
        # one is worth more.
        below = max((other for other in known if other < worth), default=None)
        return math.sqrt(known[min(known)][0] * AT_FIRST) if below is None else known[below][0]


def _size(num_reqs: int) -> int:
    """What tells numbers of requests apart."""
    return round(math.log2(num_reqs))


def _worth(step: StepAlone) -> int:
    """What tells steps apart by what they give without a round."""
    return round(FINE * math.log2(step.rate / step.num_reqs))


def _taken_in(average: tuple[float, int], sample: float) -> tuple[float, int]:
    """An average and its number of samples, with one more."""
    value, samples = average
    return value + max(GAIN, 1 / (samples + 1)) * (sample - value), samples + 1
