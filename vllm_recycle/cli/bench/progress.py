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
        self._total, self._done, self._unit = total, 0, unit
        self._what = ""
        self._start = self._since = time.monotonic()
        self._ended = threading.Event()
        self._ticks = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        if self._bar.disable:
            self._ticks.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._bar.close()

    def begin(self, what: str) -> None:
        """The next part begins."""
        self._what, self._since = what, time.monotonic()
        self._bar.set_description(what)
        self._write(what)

    def finish(self) -> None:
        """It is done."""
        self._done += 1
        self._bar.update()

    def _tick(self) -> None:
        while not self._ended.wait(LINE_SECONDS):
            self._write(f"still at {self._what}, {time.monotonic() - self._since:.0f} s")

    def _write(self, what: str) -> None:
        if self._bar.disable:
            minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
            done = f"{self._done}/{self._total} {self._unit}, {minutes}:{seconds:02d}"
            print(f"[{done}] {what}", file=sys.stderr, flush=True)
