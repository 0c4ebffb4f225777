"""What is tried now and then, and what drafts may lose: all of the exploring, and its constants.

Times and worths change. So what was not served for long is looked at: steps without drafts, by
which all others are judged, drafts of another kind, drafts that are as large or twice as large. One
account bounds what looks lose, and what drafts lose that give less than they promised. It is kept
in plain steps: in the time of a step without drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

# What drafts may lose before any gave something; also the most that they may have in the account.
# And what a plain step gives to drafts. Over 1,000 steps drafts lose no more than both.
STAKE, EARNED = 10.0, 1 / 250
# The most that a step counts for, in parts of the time that was expected: the rest is a stall. And
# the most if the step before took as much.
STALL, MOST_LONGER = 2.0, 4.0
# Steps after which what was served is stale; between looks; and those that a look may last, since
# a draft model has to catch up with texts before its first round.
STALE, LOOK_EVERY, MOST_LOOKING = 512, 128, 32
# Steps that a look at plain steps takes: of these the shortest is believed.
PLAIN_STEPS = 2
# Plain steps are looked at where so many steps one after the other took so much more, or less, time
# than expected (logarithm); not again before this has come as often again.
SURPRISES, SURPRISE = 4, 0.2
# Steps without a round of a draft model, for each plain step's time that it must read for: then one
# is made, unless it must read for more than the second.
LOOK_AT_ROUNDS_EVERY, MOST_READING = 32, 32
# Of so many plain steps one grows drafts that nobody verifies, where that does not come by itself.
GROW_EVERY = 32
# The part of what drafts gave that a step forgets, and that it forgets of drafts of another kind.
FORGET, FORGET_OTHER = 1 / 32, 1 / 512
# The part of what drafts are worth that a step forgets, where worths are averaged over steps.
FADE = 1 / 16

# What a step may be: without drafts, or with drafts of a kind and so many rows per request.
Arm = tuple[str, int]
PLAIN: Arm = ("plain", 1)


class Account:
    """What drafts may lose still, in plain steps.

    Attributes:
        credit: never above `STAKE`.

    """

    def __init__(self) -> None:
        self.credit = STAKE

    def affords(self, cost: float, *, ahead: int = 0) -> bool:
        """Whether a step may take so many plain steps' time, even if nothing is accepted.

        So may be the steps that are `ahead` of what is known.
        """
        return self.credit >= (1 + ahead) * (cost - 1.0)

    def drafted(self, tokens: float, cost: float) -> None:
        """Take in a step with drafts: tokens per request, and plain steps' time that it took."""
        self.credit = min(STAKE, self.credit + tokens - cost)

    def plain(self) -> None:
        """Take in a step without drafts."""
        self.credit = min(STAKE, self.credit + EARNED)


class Trust:
    """How far drafts of a kind keep their promise: accepted tokens for an expected one."""

    def __init__(self) -> None:
        self._accepted = self._expected = STAKE

    @property
    def factor(self) -> float:
        return self._accepted / self._expected

    def count(self, accepted: float, expected: float) -> None:
        """Take in a step with such drafts, in tokens of all requests by their number."""
        self.forget(FORGET)
        self._accepted += accepted
        self._expected += expected

    def forget(self, part: float) -> None:
        """Forget a part of what is known: nobody can keep a promise in a step without drafts."""
        self._accepted += part * (STAKE - self._accepted)
        self._expected += part * (STAKE - self._expected)


class Explorer:
    """Says what the next step is to be, where it is not to be the best.

    Loads of one cell are one: what is known of a cell says nothing of others.

    Args:
        kinds: of drafts that there are.
        ahead: steps that are under way when one is decided.

    Attributes:
        account: of what drafts and looks may lose.

    """

    def __init__(self, kinds: Sequence[str], *, ahead: int = 0) -> None:
        self.account, self.ahead = Account(), ahead
        self._new_kinds = set(kinds)  # that were neither served nor looked at
        self._num_steps = 0
        self._last: dict[tuple[Hashable, Arm], int] = {}  # the step when it was served last
        self._asked: dict[tuple[Hashable, Arm], int] = {}  # the step when a look at it began
        self._look: tuple[Hashable, Arm, int] | None = None  # and the step when it is over
        self._plain_seconds: list[float] = []  # of the look at plain steps
        self._surprises: list[float] = []
        self._most_surprises = SURPRISES

    def affords(self, cost: float) -> bool:
        """See `Account`."""
        return self.account.affords(cost, ahead=self.ahead)

    def look(self, cell: Hashable, arms: Callable[[], Mapping[Arm, float]]) -> Arm | None:
        """What the next step is to be, None for the best; to be called for each step with drafts.

        Args:
            cell: of its load.
            arms: gives what it may be beside `PLAIN`, and the plain steps' time that this takes.

        """
        self._num_steps += 1
        if self._look is not None:
            of_cell, arm, end = self._look
            if of_cell == cell and self._num_steps < end:
                return arm
            if self.ahead:
                self._look = None
        is_new = (cell, PLAIN) not in self._last and (cell, PLAIN) not in self._asked
        if is_new or len(self._surprises) >= self._most_surprises:
            self._most_surprises = SURPRISES if is_new else 2 * self._most_surprises
            return self._begin(cell, PLAIN)
        if self._num_steps % LOOK_EVERY and not self._new_kinds:
            return None
        stale = [
            arm
            for arm, cost in {PLAIN: 1.0, **arms()}.items()
            if self.is_stale(cell, arm) and self.account.affords(cost)
            if not self._new_kinds or arm[0] in self._new_kinds
        ]
        if not stale:
            return None
        return self._begin(cell, min(stale, key=lambda arm: self._asked.get((cell, arm), 0)))

    def _begin(self, cell: Hashable, arm: Arm) -> Arm:
        # Where steps are under way, the first ones may not be what they are asked to be.
        steps = MOST_LOOKING if self.ahead else PLAIN_STEPS if arm == PLAIN else 1
        self._look = cell, arm, self._num_steps + steps
        self._asked[cell, arm] = self._num_steps
        self._new_kinds.discard(arm[0])
        self._surprises.clear()
        self._plain_seconds.clear()
        return arm

    def is_stale(self, cell: Hashable, arm: Arm) -> bool:
        """Whether it was not served for long."""
        return self._last.get((cell, arm), -STALE) <= self._num_steps - STALE

    def served(
        self, cell: Hashable, arms: Sequence[Arm], *, seconds: float, expected: float
    ) -> float | None:
        """Take in a step without prompts; where a look at plain steps ends, the seconds of one.

        It may have been several arms: a draft of one node is a tree and a chain.
        """
        for arm in arms:
            self._last[cell, arm] = self._num_steps
        # A look is over when there were drafts of its kind, of whatever size.
        kinds = {kind for kind, _ in arms}
        self._new_kinds -= kinds
        if self._look is not None and self._look[0] == cell and self._look[1][0] in kinds:
            if PLAIN not in arms:
                self._look = None
            else:
                self._plain_seconds.append(seconds)
                if len(self._plain_seconds) == PLAIN_STEPS:
                    self._look = None
                    return min(self._plain_seconds)
        elif PLAIN not in arms:
            self._be_surprised(math.log(seconds / expected))
        return None

    def _be_surprised(self, error: float) -> None:
        if abs(error) < SURPRISE:
            self._surprises.clear()
            self._most_surprises = SURPRISES
        elif self._surprises and self._surprises[-1] * error < 0:
            self._surprises[:] = [error]
        else:
            self._surprises.append(error)
