"""What an engine tries now and then, and how much it may lose: all exploring, and its constants.

A look is a step that is made to learn its seconds or its worth. It has no drafts, drafts of another
kind, or larger drafts. A look is due where no such step was served for long, since seconds and
worths change. One account bounds the loss, of looks and of drafts that give less than they
promised. Its unit is the time of a step without drafts, a plain step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

# STAKE is the first credit and the highest. A plain step adds EARNED. So 1,000 steps lose at most
# 13 plain steps, and what the last steps lose that were decided before this was known.
STAKE, EARNED = 9.0, 1 / 250
# A step counts at most STALL times its expected seconds. If the step before took as long, it counts
# at most MOST_LONGER times.
STALL, MOST_LONGER = 2.0, 4.0
# Steps until what was served is stale, and steps between looks.
STALE, LOOK_EVERY = 512, 128
# Steps between looks while there is a kind of drafts that was never made.
LOOK_AT_NEW_EVERY = 3
# Steps of a look at plain steps, whose median is believed; and the most steps of any look where
# steps are decided ahead: a draft model has to catch up with texts before its first round.
PLAIN_STEPS, MOST_LOOKING = 3, 32
# Plain steps are looked at if so many steps in a row deviate by so much (logarithm) to one side,
# and there was no plain step for so many. The next such look needs twice as many surprises.
SURPRISES, SURPRISE, RECENT = 3, 0.2, 8
# The rate of a step along trunks, in parts of that of a step without, before there was any; of how
# many steps that would be the average; and the least part of a sample that a `Mean` takes.
FIRST_GAIN, FIRST_STEPS, MEAN_PART = 1.5, 3, 1 / 16
# One of so many plain steps grows drafts that no step verifies, so that their worth stays known.
GROW_EVERY = 32
# A step forgets a part of what drafts gave: of its own kind, or of the others; and a part of what
# drafts are worth, where worths are averaged over steps.
FORGET, FORGET_OTHER, FADE = 1 / 32, 1 / 512, 1 / 16
# Drafts of a kind are doubtful if less than a part came of so many tokens that they promised, until
# it is twice that part.
PROMISED, DOUBTFUL = 256.0, 0.3

# What a step may be: without drafts, or with drafts of a kind and so many rows per request.
Arm = tuple[str, int]
PLAIN: Arm = ("plain", 1)


class Mean(NamedTuple):
    """An average, above all over the last samples.

    Attributes:
        value: the average.
        samples: of how many it is.

    """

    value: float = 0.0
    samples: int = 0

    def with_sample(self, sample: float) -> Mean:
        """The average of one sample more."""
        part = max(MEAN_PART, 1 / (self.samples + 1))
        return Mean(self.value + part * (sample - self.value), self.samples + 1)


class Account:
    """How many plain steps drafts may still lose.

    Args:
        ahead: steps that are decided before one is known.

    Attributes:
        credit: from -STAKE to STAKE.

    """

    def __init__(self, *, ahead: int = 0) -> None:
        self.credit, self.ahead = STAKE, ahead

    @property
    def most(self) -> float:
        """The longest step that may be made, in plain steps: it may give nothing."""
        return 1.0 + max(0.0, self.credit) / (1 + self.ahead)

    def drafted(self, tokens: float, cost: float) -> None:
        """Take in a step with drafts: tokens per request, and plain steps' time that it took."""
        self.credit = max(-STAKE, min(STAKE, self.credit + tokens - cost))

    def plain(self) -> None:
        """Take in a step without drafts."""
        self.credit = min(STAKE, self.credit + EARNED)


class Trust:
    """How far drafts of a kind keep their promise: accepted tokens per expected token.

    Attributes:
        is_doubtful: whether few of the last `PROMISED` tokens or more came.

    """

    def __init__(self) -> None:
        self._accepted = self._expected = STAKE
        self._window_accepted = self._window_expected = 0.0
        self.is_doubtful = False

    @property
    def factor(self) -> float:
        return self._accepted / self._expected

    def count(self, accepted: float, expected: float) -> bool:
        """Take in a step with such drafts, in tokens of all requests by their number.

        Returns whether they have become doubtful with it.
        """
        self.forget(FORGET)
        self._accepted += accepted
        self._expected += expected
        self._window_accepted += accepted
        self._window_expected += expected
        if self._window_expected < PROMISED:
            return False
        was_doubtful, part = self.is_doubtful, self._window_accepted / self._window_expected
        self.is_doubtful = part < (1 + was_doubtful) * DOUBTFUL
        self._window_accepted = self._window_expected = 0.0
        return self.is_doubtful and not was_doubtful

    def forget(self, part: float) -> None:
        """Forget a part of what is known: no promise can be kept in a step without such drafts."""
        self._accepted += part * (STAKE - self._accepted)
        self._expected += part * (STAKE - self._expected)


class Explorer:
    """Says which step is a look.

    Loads of one cell share what is known. Cells share nothing.

    Args:
        kinds: of drafts that there are.
        account: what looks may lose too.

    """

    def __init__(self, kinds: Sequence[str], account: Account) -> None:
        self.account = account
        self._new_kinds = set(kinds)  # that were neither served nor looked at
        self._num_steps = 0
        self._last_steps: dict[tuple[Hashable, Arm], int] = {}  # when it was served or looked at
        # The look under way: cell, arm, its cost, and the step when it is over.
        self._look: tuple[Hashable, Arm, float, int] | None = None
        self._plain_steps: list[float | None] = []  # seconds of those of the look
        self._surprises: list[float] = []
        self._most_surprises = SURPRISES

    def look(self, cell: Hashable, arms: Callable[[], Mapping[Arm, float]]) -> Arm | None:
        """The arm of the next step if it is a look; None if the step is to be the best.

        Call it once for each step that may have drafts.

        Args:
            cell: of the load.
            arms: gives the arms beside `PLAIN`, and the plain steps' time that each takes.

        """
        self._num_steps += 1
        if self._look is not None:
            look_cell, arm, cost, end = self._look
            if look_cell == cell and self._num_steps < end and cost <= self.account.most:
                return arm
            if self._num_steps >= end + PLAIN_STEPS:  # its steps are not served as it asked
                self._look = None
        is_new = (cell, PLAIN) not in self._last_steps
        is_surprised = len(self._surprises) >= self._most_surprises
        if is_new or (is_surprised and self._last_steps[cell, PLAIN] <= self._num_steps - RECENT):
            self._most_surprises = SURPRISES if is_new else 2 * self._most_surprises
            return self._begin(cell, PLAIN, 1.0)
        interval = LOOK_AT_NEW_EVERY if self._new_kinds else LOOK_EVERY
        if self._num_steps % interval or self._look is not None:
            return None
        candidates = [
            (self._last_steps.get((cell, arm), -STALE), cost, arm)
            for arm, cost in {PLAIN: 1.0, **arms()}.items()
            if cost <= self.account.most
            if self.is_stale(cell, arm) or arm[0] in self._new_kinds
        ]
        if not candidates:
            return None
        _, cost, arm = min(candidates, key=lambda candidate: candidate[0])
        return self._begin(cell, arm, cost)

    def _begin(self, cell: Hashable, arm: Arm, cost: float) -> Arm:
        # Where steps are decided ahead, the first ones may not be what they are asked to be.
        steps = MOST_LOOKING if self.account.ahead else PLAIN_STEPS if arm == PLAIN else 1
        self._look = cell, arm, cost, self._num_steps + steps
        self._last_steps[cell, arm] = self._num_steps
        self._new_kinds.discard(arm[0])
        self._surprises.clear()
        self._plain_steps.clear()
        return arm

    def is_stale(self, cell: Hashable, arm: Arm) -> bool:
        """Whether it was neither served nor looked at for long."""
        return self._last_steps.get((cell, arm), -STALE) <= self._num_steps - STALE

    def served(
        self, cell: Hashable, arms: Sequence[Arm], *, seconds: float | None, expected: float
    ) -> tuple[bool, float | None]:
        """Take in a step; it may be several arms, as a draft of one node is a tree and a chain.

        Args:
            cell: of the load.
            arms: of the step.
            seconds: that it took; None if it had prompts.
            expected: seconds.

        Returns:
            Whether it was a look; and if it ended one at plain steps, the seconds to be believed,
            if any are known.

        """
        is_plain = PLAIN in arms
        if seconds is not None:
            for arm in arms:
                self._last_steps[cell, arm] = self._num_steps
            self._new_kinds -= {kind for kind, _ in arms}
        # A look is over when there were drafts of its kind, of whatever size.
        look = self._look
        if look is None or look[0] != cell or all(kind != look[1][0] for kind, _ in arms):
            if not is_plain and seconds is not None:
                self._be_surprised(math.log(seconds / expected))
            return False, None
        if not is_plain:
            self._look = None
            return True, None
        self._plain_steps.append(seconds)
        if len(self._plain_steps) < PLAIN_STEPS:
            return True, None
        self._look = None
        known_seconds = [seconds for seconds in self._plain_steps if seconds is not None]
        return True, median_low(known_seconds) if known_seconds else None

    def _be_surprised(self, error: float) -> None:
        if abs(error) < SURPRISE:
            self._surprises.clear()
            self._most_surprises = SURPRISES
        elif self._surprises and self._surprises[-1] * error < 0:
            self._surprises[:] = [error]
        else:
            self._surprises.append(error)
