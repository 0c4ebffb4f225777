"""Of which requests the draft model's round is worth its time, on the V1 runner."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from vllm_recycle.integration.drafter import from_first_rank

# The part of a new sample that an average takes; rounds of as many requests between corrections of
# what their forwards take; and how fine costs, and rates, are told apart, in parts of a doubling.
GAIN, CORRECT_EVERY, FINE = 1 / 16, 8, 4
# Steps that go without a round, until one is made to see what it gives: so many times what it must
# read, in steps, which is never more than the second.
LOOK_EVERY, MOST_READING = 32, 32
# What a step with a round is believed to give before any was made, but for the time of a forward,
# in parts of what one without does; and of how many rounds that would be the average: one that gave
# little must not end all.
AT_FIRST, AS_MANY = 1.5, 3


class StepAlone(NamedTuple):
    """A step as it would be without a round.

    Attributes:
        num_reqs: of the step.
        unit: seconds that it would take without drafts.
        rate: tokens that it gives by that time.

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
        # By what a forward costs and for which part of the step it is, and by what the step is
        # worth without one: the tokens of a request, by its unit, that a step with a round gave,
        # and of how many that is the average, the believed ones included.
        self._promises: defaultdict[tuple[int, int], dict[int, tuple[float, int]]]
        self._promises = defaultdict(dict)
        self._num_left_out = 0
        # Tokens of an answer, up to where it was interrupted, and of how many that is the average.
        self._length: tuple[float, int] = (0.0, 0)

    def cost(self, step: StepAlone, num_drafting: int) -> float:
        """What a forward for some requests of a step takes, in units of the step."""
        size = _size(num_drafting)
        nearest = min(self._forwards, key=lambda known: (abs(known - size), known))
        return self._forwards[nearest] / step.unit

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
        if to_read > MOST_READING or self._num_left_out < LOOK_EVERY * max(1.0, to_read):
            return np.zeros_like(may_draft)
        self._num_left_out = 0
        return may_draft

    def least_chance(self, step: StepAlone, num_drafting: int) -> float:
        """What a forward for some requests of a step costs in tokens; see `draft_trunks`."""
        promise = self._promise(step, num_drafting)
        return self.cost(step, num_drafting) * max(step.rate, promise)

    def gave(
        self, step: StepAlone, num_drafting: int, *, rate: float, seconds: float | None
    ) -> None:
        """Take in a round for some requests of a step, and the rate of the step with it.

        A forward took so many seconds, None where one had prompts to read.
        """
        known, worth = self._promises[self._kind(step, num_drafting)], _worth(step)
        believed = self._promise(step, num_drafting) / step.num_reqs, AS_MANY
        known[worth] = _taken_in(known.get(worth, believed), rate / step.num_reqs)
        if seconds is None:
            return
        size = _size(num_drafting)
        average, samples = _taken_in(self._served.get(size, (seconds, 0)), seconds)
        self._served[size] = average, samples
        if samples % CORRECT_EVERY == 0:
            self._forwards[size] = from_first_rank(average)

    def ended(self, length: int) -> None:
        """Take in an answer of so many tokens, or what there was of it when it was interrupted."""
        self._length = _taken_in(self._length, length)

    def _promise(self, step: StepAlone, num_drafting: int) -> float:
        """The rate of a step with a round."""
        known, worth = self._promises[self._kind(step, num_drafting)], _worth(step)
        if worth in known:
            return known[worth][0] * step.num_reqs
        at_first = AT_FIRST * step.rate / (1.0 + self.cost(step, step.num_reqs))
        if num_drafting < step.num_reqs:
            gained = self._promise(step, step.num_reqs) - step.rate
            at_first = step.rate + gained * num_drafting / step.num_reqs
        if not known:
            return at_first
        # A round gives no more, in parts, than where a step without one gives less, and no less
        # than where one gives more.
        nearest = max((other for other in known if other < worth), default=min(known))
        promise = known[nearest][0] * step.num_reqs * 2 ** ((worth - nearest) / FINE)
        return promise if nearest < worth else math.sqrt(promise * at_first)

    def _kind(self, step: StepAlone, num_drafting: int) -> tuple[int, int]:
        """What tells rounds apart that may gain otherwise."""
        cost = round(FINE * math.log2(1.0 + self.cost(step, num_drafting)))
        return cost, round(math.log2(step.num_reqs / num_drafting))


def _size(num_reqs: int) -> int:
    """What tells numbers of requests apart."""
    return num_reqs.bit_length()


def _worth(step: StepAlone) -> int:
    """What tells steps apart by what they give without a round."""
    return round(FINE * math.log2(step.rate / step.num_reqs))


def _taken_in(average: tuple[float, int], sample: float) -> tuple[float, int]:
    """An average and its number of samples, with one more."""
    value, samples = average
    return value + max(GAIN, 1 / (samples + 1)) * (sample - value), samples + 1
