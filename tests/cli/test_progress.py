"""Where a run is, without a terminal: lines on stderr, also while one part takes long."""

from __future__ import annotations

import re
import time

from vllm_recycle.cli.bench import progress


def test_a_part_that_takes_long_is_told_again(monkeypatch, capfd):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.1)
    with progress.Progress(3, unit="passes", done=1) as parts:
        parts.begin("load")
        parts.finish()
        parts.begin("measure")
        time.sleep(0.35)
    time.sleep(0.2)
    first, second, *others = capfd.readouterr().err.splitlines()
    assert first == "[1/3 passes, 0:00] load"
    assert second == "[2/3 passes, 0:00] measure"
    assert 1 <= len(others) <= 3  # and none when it is over
    assert all(re.fullmatch(r"\[2/3 passes, 0:00\] still at measure, 0 s", line) for line in others)
