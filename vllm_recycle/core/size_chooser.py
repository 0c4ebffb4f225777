"""How many nodes the trees of a step have: the size with the most tokens for the time, or none.

What a size would give is known from trees that were grown and, at size 0, not verified; of a
template it is a guess. That trees are worth what they say is checked where they are verified.

Nobody can check it at size 0, so what was held against trees fades there, and they are tried again.
An account of the time that they cost and gave bounds what that may lose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

# What is known of worth fades by this part in a step.
FADE = 1 / 16
# What another size must promise, in parts of a step's rate.
MARGIN = 0.03
# Of so many steps without trees one grows them, to see what they would be worth.
LOOK_EVERY = 32
# So does how far it is believed, by this part: what was expected and not accepted is not held
# against trees for ever, since without them nothing speaks for them.
TRUST_FADE = 1 / 64
# Expected tokens that are taken to have been accepted as they were expected.
PRIOR_EXPECTED = 8.0
# Plain steps' time that trees may lose, and the part of a plain step by which each gives it back.
CREDIT, EARNED = 8.0, 1 / 250
# How often a draft of a template is taken to be right. Above the truth: below it nothing would be
# drafted where that pays, and nothing be learnt, while from too much trust is soon withdrawn.
RIGHT = 0.8


def promised_gains(depths: Sequence[int]) -> np.ndarray:
    """Tokens that the first nodes of a template are taken to give.

    Args:
        depths: of the first 1, 2, ... nodes.

    Returns:
        float64 [nodes + 1], of the first 0, 1, ... nodes.

    """
    return np.cumsum([0.0, *RIGHT ** np.arange(1, max(depths) + 1)])[[0, *depths]]


class SizeChooser:
    """Chooses the size of the trees of a batch.

    Args:
        gains: where no trees are grown that could say it.

    Attributes:
        gains: float64 [nodes + 1], what the first 0, 1, ... nodes of a request's tree are said to
            give, in tokens; None before a tree was grown.
        size: that was chosen last.
        credit: plain steps' time that trees may lose; below 0 there are none.

    """

    def __init__(self, gains: np.ndarray | None = None) -> None:
        self.gains = gains
        self.size = 0
        self.credit = CREDIT
        self._weight = 0.0
        self._accepted = self._expected = 0.0

    @property
    def trust(self) -> float:
        """Accepted tokens for an expected one."""
        return (self._accepted + PRIOR_EXPECTED) / (self._expected + PRIOR_EXPECTED)

    def learn(self, worth: np.ndarray, num_reqs: int) -> None:
        """Take in trees that were grown.

        Args:
            worth: floating [nodes], of each node, summed over the requests.
            num_reqs: how many these are.

        """
        if not num_reqs:
            return
        new = np.zeros(len(worth) + 1)
        np.cumsum(worth, out=new[1:])
        new /= num_reqs
        self._weight += 1.0
        old = new if self.gains is None else self.gains
        self.gains = old + (new - old) / self._weight

    def verified(self, sizes: Iterable[int], accepted: int, *, num_reqs: int) -> None:
        """Take in a step with trees.

        Args:
            sizes: how many nodes of each tree were verified.
            accepted: tokens that were accepted of all of them.
            num_reqs: requests of the step, each of which has a token without a tree too.

        """
        if self.gains is None:
            return
        # Most are of one size.
        for size, count in Counter(sizes).items():
            self._expected += count * float(self.gains[size])
        self._accepted += accepted
        self._earn(accepted / num_reqs)

    def choose(self, seconds: Mapping[int, float], *, num_reqs: int, num_drafting: int) -> int:
        """The size of the trees that are drafted in this step.

        Args:
            seconds: of the step that verifies them, by the sizes that it may have, 0 among them.
            num_reqs: requests of that step.
            num_drafting: of these, those that have a tree.

        """
        assert self.gains is not None, "no tree was grown"
        # So that what is seen after many steps without a look is believed at once.
        self._weight *= 1.0 - FADE
        self._expected *= 1.0 - TRUST_FADE
        self._accepted *= 1.0 - TRUST_FADE
        tokens = num_drafting * self.trust
        rates = {
            size: (num_reqs + tokens * float(self.gains[size])) / time
            for size, time in seconds.items()
        }
        best = max(rates, key=lambda size: (rates[size], -size))
        held = rates.get(self.size, 0.0)
        # Plain decoding has to promise nothing: no size stays that is worse.
        if rates[best] > held * (1.0 + MARGIN) or held < rates[0]:
            self.size = best if rates[best] > rates[0] * (1.0 + MARGIN) else 0
        if self.credit < 0.0:
            self.size = 0
        self._earn(1.0 - seconds[self.size] / seconds[0] if self.size else EARNED)
        return self.size

    def _earn(self, steps: float) -> None:
        """Enter plain steps' time into the account; below 0 it was lost."""
        self.credit = min(CREDIT, self.credit + steps)
