"""Where a long run is: a bar on a terminal, elsewhere a line at least every half minute."""

from __future__ import annotations

import sys
import threading
import time

from tqdm import tqdm

LINE_SECONDS = 30.0


class Progress:
    """Counts the parts of a run; writes to stderr."""

    def __init__(self, total: int, *, unit: str) -> None:
        self._bar = tqdm(total=total, disable=None, unit=unit, leave=False)
        self._total, self._num_begun, self._unit = total, 0, unit
        self._part = ""
        self._start = self._part_start = time.monotonic()
        self._ended = threading.Event()
        self._ticks = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        if self._bar.disable:
            self._ticks.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._bar.close()

    def begin(self, part: str) -> None:
        """The next part begins, and so the one before is done."""
        self._num_begun += 1
        self._part, self._part_start = part, time.monotonic()
        self._bar.update(min(1, self._num_begun - 1))
        self._bar.set_description(part)
        self._write(part)

    def _tick(self) -> None:
        while not self._ended.wait(LINE_SECONDS):
            self._write(f"still at {self._part}, {time.monotonic() - self._part_start:.0f} s")

    def _write(self, text: str) -> None:
        if self._bar.disable:
            minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
            status = f"{self._num_begun - 1}/{self._total} {self._unit}, {minutes}:{seconds:02d}"
            print(f"[{status}] {text}", file=sys.stderr, flush=True)
