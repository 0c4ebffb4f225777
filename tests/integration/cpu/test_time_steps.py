"""Which sizes of steps are timed at start-up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_recycle.core.curve import CHAINS, TREES
from vllm_recycle.integration.cpu import time_steps

ROWS = [1, 4, 16, 8, 2]


@pytest.mark.parametrize(
    ("seconds", "again", "timed"),
    [
        pytest.param(0.001, 1, {1, 4, 16, 8, 2}, id="fast"),
        pytest.param(0.25, 1, {1, 4, 16, 8}, id="slow"),
        pytest.param(1.0, 1, {1, 4, 16}, id="slower"),
        # The first time counts.
        pytest.param(9.0, 10, {1, 4, 16}, id="slow, and disturbed the next time"),
    ],
)
def test_of_slow_steps_the_first_sizes_are_timed(seconds, again, timed, monkeypatch):
    clock, seen = SimpleNamespace(now=0.0), set()

    def time_step(runner, requests, rows, context, kind):
        took = (seconds + rows / 1e6) * (again if (kind, rows) in seen else 1)
        seen.add((kind, rows))
        clock.now += took
        return took

    monkeypatch.setattr(time_steps, "_time_step", time_step)
    monkeypatch.setattr(time_steps, "from_first_rank", lambda value: value)
    monkeypatch.setattr(time_steps.time, "perf_counter", lambda: clock.now)
    times = time_steps._time_steps(None, 2, ROWS, 256, [TREES, CHAINS])
    assert times[TREES] == times[CHAINS] == {2 * rows: seconds + rows / 1e6 for rows in timed}
