"""The size of the trees: the best for the time, held, looked for at 0, and never below plain."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from vllm_recycle.core.size_chooser import (
    EARNED,
    LOOK_AT_OTHER_EVERY,
    LOOK_EVERY,
    LOOKS_AT_OTHER,
    MARGIN,
    STAKE,
    DraftChooser,
    GraphShape,
    SizeChooser,
    StepSeconds,
)

# Seconds of a step by its rows. Rows cost nothing up to where computing takes as long as reading:
# on an A100, an H100 and an H20. Or, of a mixture of experts, each row reads more of them.
FREE_ROWS = {"A100": 124, "H100": 240, "H20": 30}
KINDS: dict[str, Callable[[int, int], float]] = {
    "dense": lambda rows, free: 5e-3 * max(1.0, rows / free),
    "mixture": lambda rows, free: (
        3e-3 * max(1.0 + 4.0 * (1 - math.exp(-rows / 16)), 5.0 * rows / (4 * free))
    ),
}
DRAFTING = 3e-4
MAX_ROWS = 512
# Recorded by record_traces.py: of a text, by token and size, what trees promised and gave.
TRACES = json.loads(Path(__file__).with_name("traces.json").read_text())
SIZES = TRACES["sizes"]


def timed(
    device: str, batch: int, *, kind: str = "dense", drafting: float = DRAFTING
) -> StepSeconds:
    """A graph for each size of a batch; a token of context costs a row's part of each row."""
    graphs = {}
    for size in {*SIZES, *range(256)}:
        rows = batch * (1 + size)
        seconds = KINDS[kind](rows, FREE_ROWS[device])
        graphs[GraphShape(rows, batch, 1 + size)] = (seconds, 1e-8 * (batch + rows / 8))
    return StepSeconds(graphs, {batch: drafting})


def learnt(*worth: float) -> SizeChooser:
    chooser = SizeChooser()
    chooser.learn(np.array(worth), 1)
    return chooser


def choose(chooser: SizeChooser, seconds: dict[int, float], num_reqs: int = 1) -> int:
    size = chooser.choose(seconds, num_reqs=num_reqs, num_drafting=num_reqs)
    chooser.take(size, seconds)
    return size


def test_the_size_with_the_most_tokens_for_the_time_is_chosen():
    assert choose(learnt(0.5, 0.4, 0.1), {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.5}) == 2
    assert choose(learnt(0.5, 0.4, 0.1), {0: 1.0, 1: 1.6, 2: 2.0, 3: 2.5}) == 0


def test_requests_that_have_no_tree_gain_nothing():
    chooser = learnt(0.5)
    assert chooser.choose({0: 1.0, 1: 1.1}, num_reqs=8, num_drafting=8) == 1
    assert chooser.choose({0: 1.0, 1: 1.1}, num_reqs=8, num_drafting=1) == 0


def test_a_size_is_held_until_another_promises_more_than_a_margin():
    chooser = learnt(0.5, 0.0)
    assert choose(chooser, {0: 1.0, 1: 1.0, 2: 1.0}) == 1
    better = 1.0 / (1 + MARGIN)
    assert choose(chooser, {0: 1.0, 1: 1.0, 2: better * 1.01}) == 1
    assert choose(chooser, {0: 1.0, 1: 1.0, 2: better * 0.99}) == 2
    # But none is held that is worse than none.
    assert choose(chooser, {0: 1.0, 1: 1.51, 2: 1.51}) == 0
    assert choose(chooser, {0: 1.0, 1: 1.49, 2: 1.51}) == 0
    assert choose(chooser, {0: 1.0, 1: 1.4, 2: 1.51}) == 1


def test_a_size_that_the_batch_may_not_have_is_not_held():
    chooser = learnt(0.5, 0.5)
    assert choose(chooser, {0: 1.0, 1: 1.0, 2: 1.0}) == 2
    assert choose(chooser, {0: 1.0, 1: 1.0}) == 1


def test_what_is_known_is_of_the_last_steps():
    chooser = learnt(0.0)
    for _ in range(100):
        chooser.learn(np.array([2.0]), 4)
        choose(chooser, {0: 1.0, 1: 2.0})
    assert chooser.gains == pytest.approx([0.0, 0.5], abs=1e-2)
    chooser.learn(np.array([0.0]), 4)
    assert chooser.gains[1] > 0.4
    # After steps without a look at trees, the next look is nearly all that is known.
    for _ in range(2 * LOOK_EVERY):
        choose(chooser, {0: 1.0, 1: 2.0})
    chooser.learn(np.array([6.0]), 6)
    assert chooser.gains[1] > 0.8


def test_trees_are_believed_as_far_as_they_keep_their_promise():
    chooser, seconds = learnt(1.0), {0: 1.0, 1: 1.4}
    assert choose(chooser, seconds) == 1
    steps = 0
    while choose(chooser, seconds) == 1:
        chooser.verified([1], 0, num_reqs=1)
        chooser.learn(np.array([1.0]), 1)
        steps += 1
    assert steps < 20
    assert chooser.trust < 0.42
    # Nobody can keep a promise at size 0: some time later it is tried again.
    assert any(choose(chooser, seconds) for _ in range(1000))


def test_what_trees_lose_is_bounded_however_often_they_are_tried_again():
    chooser, seconds = SizeChooser(), {0: 1.0, 1: 2.0}
    chooser.learn(np.array([3.0]), 1)
    sizes = []
    for _ in range(4000):
        sizes.append(choose(chooser, seconds))
        if sizes[-1]:
            chooser.verified([1], 0, num_reqs=1)
    # Each lost a plain step.
    assert sum(sizes) <= STAKE + len(sizes) * EARNED + 1
    # And it is never given up.
    assert sum(sizes[2000:]) > 5
    while chooser.credit < 3.0:
        if choose(chooser, seconds):
            chooser.verified([1], 3, num_reqs=1)
    assert [choose(chooser, seconds) for _ in range(3)] == [1] * 3


def test_a_step_takes_as_long_as_the_next_larger_graph():
    graphs = {(1, 1, 1): (5.0, 0.0), (4, 4, 1): (6.0, 0.5), (82, 6, 41): (7.0, 0.0)}
    times = StepSeconds({GraphShape(*shape): one for shape, one in graphs.items()}, {8: 1.0})
    assert times.at(0, requests=1) == 5.0
    assert times.at(0, requests=2) == times.at(0, requests=4) == 6.0
    # Linear in the context.
    assert times.at(0, requests=2, context=2) == 7.0
    assert times.at(0, requests=2, context=20) == 16.0
    assert times.at(40, requests=1) == 7.0 + 1.0
    # As many rows, of more requests; plain ones beside trees, and trees that are smaller.
    assert times.at(20, requests=3) == times.at(40, requests=6, drafting=1) == 7.0 + 1.0
    # No plain graph is left: that of trees has room.
    assert times.at(0, requests=5) == 7.0
    # Of what has no graph nothing is known.
    assert times.at(0, requests=7) is None
    assert times.at(80, requests=1) is times.at(40, requests=7, drafting=1) is None


def test_drafting_takes_what_the_next_larger_round_took():
    times = StepSeconds({GraphShape(99, 99, 99): (1.0, 0.0)}, {1: 0.1, 4: 0.3, 8: 0.5})
    seconds = [times.at(1, requests=20, drafting=n) for n in (1, 2, 4, 5, 8, 9)]
    assert seconds == pytest.approx([1.1, 1.3, 1.3, 1.5, 1.5, 1.5])
    assert times.at(0, requests=20) == 1.0
    alone = StepSeconds({GraphShape(99, 99, 99): (1.0, 0.0)}, {1: 0.5}, {20: 0.25})
    assert [alone.at(n, requests=2, alone=True) for n in (0, 1)] == [1.0, 1.25]
    assert alone.at(1, requests=2) == 1.5


# What a step takes without drafts and with them, behind a round of the draft model and alone.
DEAR_ROUND = {False: {0: 1.0, 4: 2.0}, True: {0: 1.0, 4: 1.1}}


def both(behind: float, alone: float) -> DraftChooser:
    """To which trees were shown that give so much."""
    chooser = DraftChooser()
    for kind, gain in ((False, behind), (True, alone)):
        chooser.choosers[kind].learn(np.full(4, gain / 4), 1)
    return chooser


def serve(chooser: DraftChooser, gains: dict[bool, float], steps: int) -> list[tuple[int, bool]]:
    """Steps of a request; trees give what they promise. Size, and whether the trees grew alone."""
    made = []
    for _ in range(steps):
        made.append((chooser.choose(DEAR_ROUND, num_reqs=1, num_drafting=1), chooser.alone))
        size, alone = made[-1]
        if size or len(made) % LOOK_EVERY == 1:
            chooser.choosers[alone].learn(np.full(4, gains[alone] / 4), 1)
        if size:
            chooser.choosers[alone].verified([size], gains[alone], num_reqs=1)
    return made


# 4.0 / 2.0 tokens a second behind a round and 1.5 / 1.1 alone; then 3.0 / 2.0 and 2.0 / 1.1.
@pytest.mark.parametrize(("behind", "alone", "better"), [(3.0, 0.5, False), (2.0, 1.0, True)])
def test_a_round_is_made_where_it_gives_more_for_its_time(behind, alone, better):
    gains = {False: behind, True: alone}
    made = serve(both(behind, alone), gains, 4 * LOOK_AT_OTHER_EVERY)
    others = [step for step in made if step != (4, better)]
    assert others == [(4, not better)] * len(others)
    assert 2 * LOOKS_AT_OTHER < len(others) <= 4 * LOOKS_AT_OTHER


def test_what_was_never_seen_is_looked_at():
    chooser = DraftChooser()
    chooser.choosers[False].learn(np.full(4, 0.75), 1)
    assert serve(chooser, {False: 3.0, True: 8.0}, 20)[5:] == [(4, True)] * 15


@pytest.mark.parametrize("better", [False, True])
def test_it_is_found_out_when_the_other_way_gives_more(better):
    before, gains = {better: 0.4, not better: 3.0}, {better: 8.0, not better: 1.6}
    chooser = both(before[False], before[True])
    assert serve(chooser, before, 64)[-1] == (4, not better)
    made = serve(chooser, gains, 2 * LOOK_AT_OTHER_EVERY)
    assert made.count((4, better)) > LOOK_AT_OTHER_EVERY // 2


@pytest.mark.parametrize("better", [False, True])
def test_looks_that_lose_come_seldom_but_for_ever(better):
    chooser, gains = both(0.4, 0.4), {better: 3.0, not better: 0.1}
    made = serve(chooser, gains, 100 * LOOK_AT_OTHER_EVERY)
    lost = DEAR_ROUND[not better][4] - 1.0 - 0.1
    assert made.count((4, not better)) * lost <= STAKE + len(made) * EARNED + 1.0
    made = serve(chooser, {better: 0.1, not better: 3.0}, 4 * LOOK_AT_OTHER_EVERY)
    assert made.count((4, not better)) > LOOK_AT_OTHER_EVERY


def test_a_round_that_promises_too_much_does_not_come_again_and_again():
    chooser = both(3.0, 0.5)
    made = []
    for _ in range(8 * LOOK_AT_OTHER_EVERY):
        size = chooser.choose(DEAR_ROUND, num_reqs=1, num_drafting=1)
        kind = chooser.choosers[chooser.alone]
        # 2.5 / 2.0 tokens a second behind a round, of 4.0 / 2.0 that it promises, 1.5 / 1.1 alone.
        kind.learn(np.full(4, (0.5 if chooser.alone else 3.0) / 4), 1)
        kind.verified([size], 0.5 if chooser.alone else 1.5, num_reqs=1)
        made.append(chooser.alone)
    assert made[LOOK_AT_OTHER_EVERY:].count(False) < len(made) // 16


def test_where_nothing_is_drafted_both_are_looked_at():
    chooser = both(0.0, 0.0)
    made = serve(chooser, {False: 0.0, True: 0.0}, 4 * LOOK_EVERY)
    assert {size for size, _ in made} == {0}
    assert {alone for _, alone in made[::LOOK_EVERY]} == {False, True}
    made = serve(chooser, {False: 0.0, True: 2.0}, 4 * LOOK_EVERY - LOOKS_AT_OTHER)
    assert made[-1] == (4, True)


def test_without_a_draft_model_nothing_is_looked_at():
    chooser = DraftChooser()
    chooser.choosers[False].learn(np.full(4, 0.75), 1)
    for _ in range(LOOK_AT_OTHER_EVERY + 1):
        assert chooser.choose({False: {0: 1.0, 4: 1.0}}, num_reqs=1, num_drafting=1) == 4
        assert not chooser.alone


class Served:
    """Requests that go through recorded texts, with the trees that a chooser asks for."""

    def __init__(
        self,
        times: StepSeconds,
        batch: int,
        context: float,
        *,
        boast: float = 1.0,
    ) -> None:
        self.times, self.batch, self.context, self.boast = times, batch, context, boast
        self.texts = TRACES["texts"]
        self.fitting = [n for n in SIZES if not n or batch * (n + 1) <= MAX_ROWS]
        # Each somewhere in a text; behind its end the next one begins.
        lengths = [len(text["accepted"]) for text in self.texts]
        owners = [index % len(lengths) for index in range(batch)]
        self.places = [(text, 13 * i % lengths[text]) for i, text in enumerate(owners)]
        self.chooser = SizeChooser()
        self.seconds = self.plain_seconds = 0.0
        self.sizes: list[int] = []

    def step(self, size: int) -> None:
        """Verify trees of a size, and go on."""
        tokens = accepted = 0
        for index, (text, place) in enumerate(self.places):
            gain = self.texts[text]["accepted"][place][SIZES.index(size)]
            accepted, tokens, place = accepted + gain, tokens + 1 + gain, place + 1 + gain
            if place >= len(self.texts[text]["accepted"]):
                text, place = (text + 1) % len(self.texts), 0
            self.places[index] = (text, place)
        if size:
            self.chooser.verified([size] * self.batch, accepted, num_reqs=self.batch)
        self.seconds += self.seconds_of(size)
        self.plain_seconds += tokens / self.batch * self.seconds_of(0)
        self.sizes.append(size)

    def seconds_of(self, size: int) -> float:
        seconds = self.times.at(size, requests=self.batch, context=self.context)
        assert seconds is not None
        return seconds

    def worth(self) -> np.ndarray:
        """By node, as it is computed where these trees are grown."""
        worth = np.zeros(SIZES[-1])
        for text, place in self.places:
            sums = TRACES["texts"][text]["worth"][place]
            for (a, b), (x, y) in zip(pairwise(SIZES), pairwise(sums), strict=True):
                worth[a:b] += self.boast * (y - x) / (b - a)
        return worth

    def run(self, steps: int) -> float:
        """Serve; returns the speed, 1 being that of plain decoding."""
        seconds = {size: self.seconds_of(size) for size in self.fitting}
        size, idle, on_its_way = 0, 0, []
        for _ in range(steps):
            self.step(size)
            # What is seen of a step is a step old.
            for worth in on_its_way:
                self.chooser.learn(worth, self.batch)
            on_its_way = []
            if self.chooser.gains is not None:
                size = choose(self.chooser, seconds, self.batch)
            if size or idle % LOOK_EVERY == 0:
                on_its_way = [self.worth()]
                self.seconds += 0.0 if size else DRAFTING
            idle = 0 if size else idle + 1
        return self.plain_seconds / self.seconds


@pytest.mark.parametrize("context", [512, 32768])
@pytest.mark.parametrize("batch", [1, 4, 32, 128, 384])
@pytest.mark.parametrize("device", FREE_ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_speed_is_never_below_that_of_plain_decoding(kind, device, batch, context):
    served = Served(timed(device, batch, kind=kind), batch, context)
    assert served.run(400 if batch < 32 else 100) > 0.99


@pytest.mark.parametrize("device", FREE_ROWS)
def test_one_request_is_faster_with_trees_and_a_large_batch_has_none(device):
    assert Served(timed(device, 1), 1, 512).run(400) > 1.5
    full = Served(timed(device, 512), 512, 512)
    assert full.run(50) > 0.99
    assert set(full.sizes) == {0}


def test_devices_differ_in_the_sizes_that_pay():
    chosen = {}
    for device in FREE_ROWS:
        served = Served(timed(device, 8), 8, 512)
        served.run(100)
        chosen[device] = served.sizes[-1]
    # The H20 computes a seventh of what an H100 does.
    assert chosen["H20"] < chosen["H100"]


@pytest.mark.parametrize("batch", [1, 32])
def test_trees_that_promise_too_much_are_found_out(batch):
    served = Served(timed("H20", batch, kind="mixture"), batch, 512, boast=4.0)
    assert served.run(600) > 0.97
