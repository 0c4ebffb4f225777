"""Times that follow what served steps take: right sizes after a start or a change that misled."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vllm_recycle.core.price import CHAINS, TREES, StepTimes
from vllm_recycle.core.served_times import CORRECT_EVERY, LOOK_EVERY, ServedTimes

MAX_ROWS = 64
LOADS = ((1, 256), (8, 512))
# What the first 0, 1, ... rows of a request give, in tokens.
GAINS = {TREES: np.cumsum(0.75 ** np.arange(33)), CHAINS: np.cumsum(0.72 ** np.arange(33))}
KINDS = (TREES, CHAINS)


def seconds_of(kind: str | None, rows: int, *, plain: float, of_row: float, of_trees: float):
    return plain + of_row * (rows - 1) + (of_trees if kind == TREES else 0.0)


def measured(**machine: float) -> dict[str, StepTimes]:
    def points(kind: str) -> dict[tuple[int, int], dict[int, float]]:
        rows = (1, 2, 4, 8, 16, 32)
        return {
            (requests, context): {
                requests * n: seconds_of(kind if n > 1 else None, requests * n, **machine)
                for n in rows
            }
            for requests, context in LOADS
        }

    return {kind: StepTimes.measured(points(kind), MAX_ROWS) for kind in KINDS}


def chosen(times: dict[str, StepTimes]) -> tuple[str, int]:
    """The kind and the rows of one request that promise the most."""
    rates = {kind: GAINS[kind][:32] / of.at(1, 256).numpy()[1:33] for kind, of in times.items()}
    kind = max(rates, key=lambda kind: rates[kind].max())
    return kind, 1 + int(rates[kind].argmax())


def rate_of(kind: str, rows: int, machine: dict[str, float]) -> float:
    return GAINS[kind][rows - 1] / seconds_of(kind if rows > 1 else None, rows, **machine)


def serve(served: ServedTimes, machine: dict[str, float], steps: int, noise: np.random.Generator):
    """Serve steps of one request; returns how many were not of the size that pays."""
    looks = 0
    for _ in range(steps):
        kind, served.rows = chosen(served.times)
        rows = served.rows
        if (look := served.look_at(1, 256)) is not None:
            looks += 1
            kind, rows = look[0] or kind, 1 + look[1]
        seconds = seconds_of(kind if rows > 1 else None, rows, **machine)
        seconds *= float(noise.lognormal(sigma=0.05))
        if noise.random() < 0.01:
            seconds *= 20  # a stall
        at = None if rows == 1 else kind
        if served.serve(at, rows, num_reqs=1, context=256, seconds=seconds):
            served.correct(served.logs, served.last)
    return looks


FAST = {"plain": 0.010, "of_row": 0.0006, "of_trees": 0.0012}


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(FAST | {"plain": 0.030}, id="rows looked free"),
        pytest.param(FAST | {"of_row": 0.004}, id="rows looked dear"),
        pytest.param(FAST | {"of_trees": 0.010}, id="trees looked dear"),
        pytest.param(FAST, id="right"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_sizes_are_right_after_a_start_that_misled(start, seed):
    served, noise = ServedTimes(measured(**start)), np.random.default_rng(seed)
    looks = serve(served, FAST, 1500, noise)
    assert looks <= 1 + 1500 / LOOK_EVERY
    best = max(rate_of(kind, rows, FAST) for kind in KINDS for rows in range(1, 33))
    assert rate_of(*chosen(served.times), FAST) > 0.95 * best


def test_a_step_without_drafts_is_looked_at_soon_where_none_was_served():
    served, noise = ServedTimes(measured(**FAST)), np.random.default_rng(0)
    # A shorter context takes as much off each step, so that rows are dearer than they looked.
    shorter = FAST | {"plain": 0.006}
    assert serve(served, shorter, 2 * CORRECT_EVERY, noise) == 1
    assert served.times[TREES].seconds[0] == pytest.approx(0.006, rel=0.2)
    assert serve(served, shorter, 96, noise) == 1  # from now on as seldom as others


def test_a_look_that_was_not_served_is_not_asked_for_again_at_once():
    served = ServedTimes(measured(**FAST))
    looks = [step for step in range(1, LOOK_EVERY) if served.look_at(1, 256) is not None]
    assert looks == [CORRECT_EVERY]


@pytest.mark.parametrize("seed", range(3))
def test_a_machine_that_changes_is_followed(seed):
    served, noise = ServedTimes(measured(**FAST)), np.random.default_rng(seed)
    slow = {"plain": 0.011, "of_row": 0.005, "of_trees": 0.0012}
    for machine in (FAST, slow, FAST):
        serve(served, machine, 2500, noise)
        best = max(rate_of(kind, rows, machine) for kind in KINDS for rows in range(1, 33))
        assert rate_of(*chosen(served.times), machine) > 0.9 * best


def test_a_stall_moves_little():
    served = ServedTimes(measured(**FAST))
    for seconds in [0.010] * (CORRECT_EVERY - 1) + [10.0]:
        served.serve(None, 1, num_reqs=1, context=256, seconds=seconds)
    served.correct(served.logs, served.last)
    assert math.exp(np.nanmax(served.logs)) < 1.05
    assert served.known() == {
        f"seconds_by_measured: {kind}, 1 requests, 256 tokens, 1 rows": pytest.approx(
            1.03, abs=0.01
        )
        for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_time_of_a_step_without_drafts_is_followed_at_its_load(kind):
    served, before = ServedTimes(measured(**FAST)), measured(**FAST)[kind]
    for _ in range(6 * CORRECT_EVERY):
        served.serve(None, 1, num_reqs=1, context=256, seconds=2 * FAST["plain"])
    served.correct(served.logs, served.last)
    factors = [1.0] * len(before.loads)
    factors[before.nearest(1, 256)] = 2.0
    took = np.array(served.times[kind].seconds) / before.seconds
    assert took == pytest.approx(factors, rel=0.01)


def test_what_is_not_known_is_not_corrected():
    times = measured(**FAST)
    served = ServedTimes(times)
    served.correct(served.logs, served.last)
    for kind in KINDS:
        assert np.allclose(served.times[kind].times, times[kind].times)
