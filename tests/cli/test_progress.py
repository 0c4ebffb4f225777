"""Where a run is, without a terminal: lines on stderr, also while one part takes long."""

from __future__ import annotations

import re
import time

from vllm_recycle.cli.bench import progress


def test_a_part_that_takes_long_is_told_again(monkeypatch, capfd):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.1)
    with progress.Progress(3, unit="passes") as parts:
        parts.begin("load")
        parts.finish()
        parts.begin("measure")
        time.sleep(0.35)
    time.sleep(0.2)
    first, second, *others = capfd.readouterr().err.splitlines()
    assert first == "[0/3 passes, 0:00] load"
    assert second == "[1/3 passes, 0:00] measure"
    assert others
    for line in others:
        assert re.fullmatch(r"\[1/3 passes, 0:\d\d\] still at measure, \d+ s", line)
    time.sleep(0.3)
    assert not capfd.readouterr().err  # it is over
