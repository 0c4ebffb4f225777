"""How many nodes the trees of a step have: the size with the most tokens for the time, or none.

What a size would give is known from trees that were grown and, at size 0, not verified. That they
are worth what they say is checked where they are verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

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


class SizeChooser:
    """Chooses the size of the trees of a batch.

    Attributes:
        gains: of a request, the tokens that the first 0, 1, 2, ... nodes of its tree are said to
            give; None before a tree was grown.
        size: that was chosen last.

    """

    def __init__(self) -> None:
        self.gains: list[float] | None = None
        self.size = 0
        self._weight = 0.0
        self._accepted = self._expected = 0.0

    @property
    def trust(self) -> float:
        """Accepted tokens for an expected one."""
        return (self._accepted + PRIOR_EXPECTED) / (self._expected + PRIOR_EXPECTED)

    def learn(self, worth: Sequence[float], num_reqs: int) -> None:
        """Take in trees that were grown.

        Args:
            worth: of each node, summed over the requests.
            num_reqs: how many these are.

        """
        if not num_reqs:
            return
        new = [0.0, *accumulate(value / num_reqs for value in worth)]
        self._weight += 1.0
        part = 1.0 / self._weight
        old = self.gains or new
        self.gains = [a + part * (b - a) for a, b in zip(old, new, strict=True)]

    def verified(self, sizes: Sequence[int], accepted: int) -> None:
        """Take in a step with trees.

        Args:
            sizes: how many nodes of each tree were verified.
            accepted: tokens that were accepted of all of them.

        """
        if self.gains is None:
            return
        self._expected += sum(map(self.gains.__getitem__, sizes))
        self._accepted += accepted

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
            size: (num_reqs + tokens * self.gains[size]) / time for size, time in seconds.items()
        }
        best = max(rates, key=lambda size: (rates[size], -size))
        held = rates.get(self.size, 0.0)
        # Plain decoding has to promise nothing: no size stays that is worse.
        if rates[best] > held * (1.0 + MARGIN) or held < rates[0]:
            self.size = best if rates[best] > rates[0] * (1.0 + MARGIN) else 0
        return self.size
