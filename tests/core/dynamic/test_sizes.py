"""The size of the trees: the best for the time, held, looked for at 0, and never below plain."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from device_costs import LLAMA_8B, QWEN_30B_A3B

from vllm_recycle.core.dynamic.roofline import device_of
from vllm_recycle.core.dynamic.sizes import LOOK_EVERY, MARGIN, SizeChooser
from vllm_recycle.core.dynamic.step_seconds import StepSeconds

DEVICES = {name: device_of(name) for name in ("A100-SXM4-80GB", "H100 80GB HBM3", "H20")}
DRAFTING = 3e-4
MAX_ROWS = 512
# Recorded by record_traces.py: of a text, by token and size, what trees promised and gave.
TRACES = json.loads(Path(__file__).with_name("traces.json").read_text())
SIZES = TRACES["sizes"]


def learnt(*worth: float) -> SizeChooser:
    chooser = SizeChooser()
    chooser.learn(worth, 1)
    return chooser


def choose(chooser: SizeChooser, seconds: dict[int, float], num_reqs: int = 1) -> int:
    return chooser.choose(seconds, num_reqs=num_reqs, num_drafting=num_reqs)


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
        chooser.learn([2.0], 4)
        choose(chooser, {0: 1.0, 1: 2.0})
    assert chooser.gains == pytest.approx([0.0, 0.5], abs=1e-2)
    chooser.learn([0.0], 4)
    assert chooser.gains[1] > 0.4
    # After steps without a look at trees, the next look is nearly all that is known.
    for _ in range(2 * LOOK_EVERY):
        choose(chooser, {0: 1.0, 1: 2.0})
    chooser.learn([6.0], 6)
    assert chooser.gains[1] > 0.8


def test_trees_are_believed_as_far_as_they_keep_their_promise():
    chooser, seconds = learnt(1.0), {0: 1.0, 1: 1.4}
    assert choose(chooser, seconds) == 1
    steps = 0
    while choose(chooser, seconds) == 1:
        chooser.verified([1], 0)
        chooser.learn([1.0], 1)
        steps += 1
    assert steps < 20
    assert chooser.trust < 0.4
    # Nobody can keep a promise at size 0: some time later it is tried again.
    for _ in range(1000):
        choose(chooser, seconds)
    assert chooser.size == 1


class Served:
    """Requests that go through recorded texts, with the trees that a chooser asks for."""

    def __init__(self, times: StepSeconds, batch: int, context: float, boast: float = 1.0) -> None:
        self.times, self.batch, self.context, self.boast = times, batch, context, boast
        # Each somewhere in a text; behind its end the next one begins.
        lengths = [len(text["accepted"]) for text in TRACES["texts"]]
        owners = [index % len(lengths) for index in range(batch)]
        self.places = [(text, 13 * i % lengths[text]) for i, text in enumerate(owners)]
        self.chooser = SizeChooser()
        self.seconds = self.plain_seconds = 0.0
        self.sizes: list[int] = []

    def step(self, size: int) -> None:
        """Verify trees of a size, and go on."""
        tokens = accepted = 0
        for index, (text, place) in enumerate(self.places):
            gain = TRACES["texts"][text]["accepted"][place][SIZES.index(size)]
            accepted, tokens, place = accepted + gain, tokens + 1 + gain, place + 1 + gain
            if place >= len(TRACES["texts"][text]["accepted"]):
                text, place = (text + 1) % len(TRACES["texts"]), 0
            self.places[index] = (text, place)
        if size:
            self.chooser.verified([size] * self.batch, accepted)
        self.seconds += self.seconds_of(size)
        self.plain_seconds += tokens / self.batch * self.seconds_of(0)
        self.sizes.append(size)

    def seconds_of(self, size: int) -> float:
        return self.times.at(size, requests=self.batch, context=self.context)

    def worth(self) -> list[float]:
        """By node, as it is computed where these trees are grown."""
        worth = [0.0] * SIZES[-1]
        for text, place in self.places:
            sums = TRACES["texts"][text]["worth"][place]
            for (a, b), (x, y) in zip(pairwise(SIZES), pairwise(sums), strict=True):
                for node in range(a, b):
                    worth[node] += self.boast * (y - x) / (b - a)
        return worth

    def run(self, steps: int) -> float:
        """Serve; returns the speed, 1 being that of plain decoding."""
        fitting = [n for n in SIZES if n == 0 or self.batch * (n + 1) <= MAX_ROWS]
        seconds = {size: self.seconds_of(size) for size in fitting}
        size, idle, on_its_way = 0, 0, []
        for _ in range(steps):
            self.step(size)
            # What is seen of a step is a step old.
            for worth in on_its_way:
                self.chooser.learn(worth, self.batch)
            on_its_way = []
            if self.chooser.gains is not None:
                size = self.chooser.choose(seconds, num_reqs=self.batch, num_drafting=self.batch)
            if size or idle % LOOK_EVERY == 0:
                on_its_way = [self.worth()]
                self.seconds += 0.0 if size else DRAFTING
            idle = 0 if size else idle + 1
        return self.plain_seconds / self.seconds


@pytest.mark.parametrize("context", [512, 32768])
@pytest.mark.parametrize("batch", [1, 4, 32, 128, 384])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [LLAMA_8B, QWEN_30B_A3B], ids=["dense", "mixture"])
def test_speed_is_never_below_that_of_plain_decoding(model, device, batch, context):
    served = Served(StepSeconds(DEVICES[device], model, drafting=DRAFTING), batch, context)
    assert served.run(400 if batch < 32 else 100) > 0.99


@pytest.mark.parametrize("device", DEVICES)
def test_one_request_is_faster_with_trees_and_a_large_batch_has_none(device):
    times = StepSeconds(DEVICES[device], LLAMA_8B, drafting=DRAFTING)
    assert Served(times, 1, 512).run(400) > 1.5
    full = Served(times, 512, 512)
    assert full.run(50) > 0.99
    assert set(full.sizes) == {0}


def test_devices_differ_in_the_sizes_that_pay():
    chosen = {}
    for name, device in DEVICES.items():
        served = Served(StepSeconds(device, LLAMA_8B, drafting=DRAFTING), 8, 512)
        served.run(100)
        chosen[name] = served.sizes[-1]
    # The H20 computes a seventh of what an H100 does.
    assert chosen["H20"] < chosen["H100 80GB HBM3"]


@pytest.mark.parametrize("batch", [1, 32])
def test_trees_that_promise_too_much_are_found_out(batch):
    times = StepSeconds(DEVICES["H20"], QWEN_30B_A3B, drafting=DRAFTING)
    assert Served(times, batch, 512, boast=4.0).run(600) > 0.97
