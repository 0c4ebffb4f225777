"""How many nodes the trees of a step on a GPU have: the most tokens for the time, or none.

A step is one of captured graphs, each timed at start-up. What a size would give is known from trees
that were grown, verified or not. Where drafts are verified, the chooser checks whether they are
worth what they promise. At size 0 nobody can check, so what was held against the drafts fades, and
they are tried again; an account of the time that they cost and gave bounds what that may lose.

Where there is a draft model, trees grow behind a round of it, or alone: whichever gives more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

# The part of what is known of worth that a step forgets; of trust it is half as much.
FADE = 1 / 16
# Of so many steps without drafts one grows trees, to see what they would be worth.
LOOK_EVERY = 32
# In so many steps with drafts so many trees are looked at that are made the other way, behind a
# round of the draft model or alone; in a row, since the model has to catch up with texts before its
# first round, which may take some steps, but no more than these.
LOOK_AT_OTHER_EVERY, LOOKS_AT_OTHER, MOST_LOOKING = 256, 4, 32
# What another size must promise, in parts of a step's rate.
MARGIN = 0.03
# What drafts are trusted with before anything is known: so many tokens count as accepted as they
# were expected, and so many plain steps' time may be lost.
STAKE = 8.0
# The part of a plain step's time that each step gives back to drafts that it does not make.
EARNED = 1 / 250

# Rows of a request that a program of attention serves, by which graphs are compared.
ROWS_OF_A_PROGRAM = 32


class GraphShape(NamedTuple):
    """What a step has, or what a graph has room for.

    Attributes:
        num_tokens: rows of all requests.
        num_reqs: requests.
        max_query_len: rows of the request that has most; 1 where nothing is drafted.

    """

    num_tokens: int
    num_reqs: int
    max_query_len: int

    @property
    def cost(self) -> int:
        """To compare graphs by: rows, and programs of attention.

        These are for the most rows of each request, and one that finds no row takes a step some
        third of the time that a row more takes, by counting.
        """
        return 3 * self.num_tokens + self.num_reqs * -(-self.max_query_len // ROWS_OF_A_PROGRAM)


def by_preference(
    shapes: Iterable[GraphShape], seconds: Mapping[GraphShape, float] | None = None
) -> list[GraphShape]:
    """Graphs in the order in which a step tries them: plain ones, then the cheaper first.

    Those of trees are compared by their `seconds`, where these were measured.
    """

    def rank(shape: GraphShape) -> tuple[bool, float, GraphShape]:
        is_tree = shape.max_query_len > 1
        return is_tree, seconds[shape] if seconds and is_tree else shape.cost, shape

    return sorted(shapes, key=rank)


@dataclass(frozen=True)
class StepSeconds:
    """Times of steps, as they were measured.

    Attributes:
        graphs: of each graph, the seconds of its step behind no context, and the seconds more for
            each token of context that its requests have.
        drafting: seconds to draft, by how many requests that is for at most.
        alone: those without a round of the draft model; empty where there is none.

    """

    graphs: Mapping[GraphShape, tuple[float, float]] = field(default_factory=dict)
    drafting: Mapping[int, float] = field(default_factory=dict)
    alone: Mapping[int, float] = field(default_factory=dict)

    def at(
        self,
        nodes: int,
        *,
        requests: int,
        drafting: int | None = None,
        context: float = 0.0,
        alone: bool = False,
    ) -> float | None:
        """Seconds of a step without a prompt; None where it has no graph: nothing is known then.

        Args:
            nodes: of each tree; 0 for a plain step, which nothing is drafted for.
            requests: of the step.
            drafting: of these, those that have a tree; None for all.
            context: tokens before each request's rows, on average.
            alone: whether trees grow without a round.

        """
        drafting = requests if drafting is None else drafting
        timed = self._graph_of(GraphShape(requests + nodes * drafting, requests, nodes + 1))
        if timed is None:
            return None
        seconds, per_token = timed
        seconds += per_token * context
        return seconds + _at(self.alone if alone else self.drafting, drafting) if nodes else seconds

    def _graph_of(self, step: GraphShape) -> tuple[float, float] | None:
        """The times of the graph that a step gets."""
        for graph in self.preference:
            if all(room >= need for room, need in zip(graph, step, strict=True)):
                return self.graphs[graph]
        return None

    @cached_property
    def preference(self) -> list[GraphShape]:
        """The graphs, in the order in which steps are to try them."""
        return by_preference(self.graphs, {shape: time for shape, (time, _) in self.graphs.items()})


def _at(seconds: Mapping[int, float], requests: int) -> float:
    """Seconds to draft for so many: as for the next more that were timed, or the most."""
    timed = sorted(seconds)
    at = next((batch for batch in timed if batch >= requests), timed[-1] if timed else None)
    return 0.0 if at is None else seconds[at]


class SizeChooser:
    """Chooses the size of the trees of a batch.

    Attributes:
        gains: float64 [nodes + 1], what the first 0, 1, ... nodes of a request's tree are said to
            give, in tokens; None before a tree was grown.
        size: that was chosen last; None before the first choice.
        rate: tokens a second that it promised.
        num_looks: trees that were taken in, those of all requests of a step together as one.
        credit: plain steps' time that trees may lose; below 0 there are none.

    """

    def __init__(self) -> None:
        self.gains: np.ndarray | None = None
        self.size: int | None = None
        self.rate, self.num_looks = 0.0, 0
        self.credit = STAKE
        self._weight = 0.0
        self._accepted = self._expected = 0.0

    @property
    def trust(self) -> float:
        """Accepted tokens for an expected one."""
        return (self._accepted + STAKE) / (self._expected + STAKE)

    def learn(self, worth: np.ndarray, num_reqs: int) -> None:
        """Take in trees that were grown: the worth of each node, summed over the requests."""
        if not num_reqs:
            return
        new = np.zeros(len(worth) + 1)
        np.cumsum(worth, out=new[1:])
        new /= num_reqs
        self.num_looks += 1
        self._weight = min(self._weight + 1.0, 1.0 / FADE)
        old = new if self.gains is None else self.gains
        self.gains = old + (new - old) / self._weight

    def verified(self, sizes: Iterable[int], accepted: int, *, num_reqs: int) -> None:
        """Take in a step of some requests.

        The `sizes` are the nodes of each tree that were verified, `accepted` the tokens of all.
        """
        self._earn(accepted / num_reqs)
        if self.gains is None:
            return
        # Most are of one size.
        for size, count in Counter(sizes).items():
            self._expected += count * float(self.gains[size])
        self._accepted += accepted

    def choose(self, seconds: Mapping[int, float], *, num_reqs: int, num_drafting: int) -> int:
        """The size of the trees that this step should draft.

        `seconds` are those of the step that verifies them, by the sizes that it may have, 0 among
        them; of its `num_reqs` requests, `num_drafting` have a tree.
        """
        assert self.gains is not None, "no tree was grown"
        tokens = num_drafting * self.trust
        rates = {
            size: (num_reqs + tokens * float(self.gains[size])) / time
            for size, time in seconds.items()
        }
        size = self.size or 0
        best = max(rates, key=lambda size: (rates[size], -size))
        held = rates.get(size, 0.0)
        # Plain decoding has to promise nothing: no size stays that is worse.
        if rates[best] > held * (1.0 + MARGIN) or held < rates[0]:
            size = best if rates[best] > rates[0] * (1.0 + MARGIN) else 0
        if self.credit < 0.0:
            size = 0
        self.size, self.rate = size, rates[size]
        return size

    def take(self, size: int, seconds: Mapping[int, float]) -> None:
        """Take in that this step drafts trees of a size; the `seconds` are as above."""
        # So that what is seen after many steps without a look is believed at once.
        self._weight *= 1.0 - FADE
        self._expected *= 1.0 - FADE / 2
        self._accepted *= 1.0 - FADE / 2
        self._earn(1.0 - seconds[size] / seconds[0] if size else EARNED)

    def wait(self) -> None:
        """Take in that this step drafts in another way."""
        self._weight *= 1.0 - FADE / 16
        self._earn(EARNED)

    def _earn(self, steps: float) -> None:
        """Enter plain steps' time into the account; below 0 it was lost."""
        self.credit = min(STAKE, self.credit + steps)


class DraftChooser:
    """Chooses how a step drafts: of what size, and where there is a draft model, whether by it.

    Attributes:
        choosers: of the sizes of trees that grow behind a round of the draft model, if there is
            one, at False, and of those that grow alone at True.
        held: which of both promised more when they were last compared.
        alone: whether the trees of this step grow alone, if any do.

    """

    def __init__(self) -> None:
        self.choosers = {False: SizeChooser(), True: SizeChooser()}
        self.held = self.alone = False
        self._num_steps = self._look_until = 0

    @property
    def size(self) -> int | None:
        """The size that was chosen last; None before the first choice."""
        return self.choosers[self.held].size

    def seen(self, kinds: Iterable[bool]) -> list[bool]:
        """Of which kinds, alone or not, a tree was grown."""
        return [alone for alone in kinds if self.choosers[alone].gains is not None]

    def hold(self) -> None:
        """Take in a step of which nothing is known."""
        self.alone = self.held

    def choose(
        self, seconds: Mapping[bool, Mapping[int, float]], *, num_reqs: int, num_drafting: int
    ) -> int:
        """As `SizeChooser.choose`, by whether trees grow alone; of one kind a tree was grown."""
        seen = self.seen(seconds)
        of_batch = {"num_reqs": num_reqs, "num_drafting": num_drafting}
        sizes = {alone: self.choosers[alone].choose(seconds[alone], **of_batch) for alone in seen}
        rates = {alone: self.choosers[alone].rate for alone in seen}
        best = max(seen, key=lambda alone: rates[alone])
        if rates[best] > rates.get(self.held, 0.0) * (1.0 + MARGIN):
            self.held = best
        size = sizes[self.held]
        self._num_steps += 1
        looks = len(seconds) > 1 and self._looks(size)
        self.alone = not self.held if looks else self.held
        for alone, of_size in seconds.items():
            if alone == self.alone or not size:
                self.choosers[alone].take(size, of_size)
            else:
                self.choosers[alone].wait()
        return size

    def _looks(self, size: int) -> bool:
        """Whether to make trees in the way that is not held, to see what they give."""
        other, step = self.choosers[not self.held], self._num_steps % LOOK_AT_OTHER_EVERY
        if other.gains is None:
            return other.credit >= 0.0
        if not size:  # where trees grow in one step of so many
            return self._num_steps // LOOK_EVERY % 2 == 1
        if step == 0 and other.credit >= 0.0:
            self._look_until = other.num_looks + LOOKS_AT_OTHER
        return step < MOST_LOOKING and other.num_looks < self._look_until
