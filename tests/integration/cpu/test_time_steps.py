"""Which sizes of steps are timed at start-up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_recycle.core.curve import CHAINS, TREES
from vllm_recycle.integration.cpu import time_steps


@pytest.mark.parametrize(
    ("seconds", "timed"),
    [(0.001, {1, 4, 16, 8, 2}), (0.25, {1, 4, 16, 8}), (1.0, {1, 4, 16})],
)
def test_of_slow_steps_the_first_sizes_are_timed(seconds, timed, monkeypatch):
    clock = SimpleNamespace(now=0.0)

    def time_step(runner, requests, rows, context, kind):
        clock.now += seconds
        return seconds

    monkeypatch.setattr(time_steps, "_time_step", time_step)
    monkeypatch.setattr(time_steps, "from_first_rank", lambda value: value)
    monkeypatch.setattr(time_steps.time, "perf_counter", lambda: clock.now)
    times = time_steps._time_steps(None, 2, [1, 4, 16, 8, 2], 256, [TREES, CHAINS])
    assert times[TREES].keys() | times[CHAINS].keys() == {2 * rows for rows in timed}
    assert times[TREES][2] == times[CHAINS][2] == seconds


def test_of_slow_steps_the_first_time_counts_where_the_next_one_is_disturbed(monkeypatch):
    timed = set()

    def time_step(runner, requests, rows, context, kind):
        is_first = (kind, rows) not in timed
        timed.add((kind, rows))
        return float(rows) if is_first else 10.0 * rows

    monkeypatch.setattr(time_steps, "_time_step", time_step)
    monkeypatch.setattr(time_steps, "from_first_rank", lambda value: value)
    monkeypatch.setattr(time_steps, "MAX_SECONDS", 0.0)
    times = time_steps._time_steps(None, 2, [1, 4, 16, 8, 2], 256, [TREES, CHAINS])
    assert times[TREES] == times[CHAINS] == {2: 1.0, 8: 4.0, 32: 16.0}
