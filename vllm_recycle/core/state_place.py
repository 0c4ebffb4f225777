"""Where a state lives between engines: in a file, or in a folder that replicas share.

A file has one writer at a time, or the last one wins. In a folder each replica writes files of its
own, and all take in what the others write. No lock decides anything, since mounted folders often
have none:

- A file is complete when it appears, under a name that is never used again. So a name stands for
  one content.
- A replica replaces its own file. It removes another one only after it has taken that in and
  written the result, if the file is older than its own new one by `stale_after`.

So all that replicas could take in is in some file at any time, whoever ends when. Ages are
differences between times of files, so no clock but the folder's matters.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path

SUFFIX = ".safetensors"


class StatePlace:
    """A place, and which files in it this replica has written or taken in.

    Args:
        path: of a file that need not exist, or of a folder that does.
        name: what the names of files in the folder begin with, of all that may start from them.
        stale_after: seconds without a write after which a file that was taken in is removed.

    Attributes:
        path: of the file or the folder.
        is_folder: whether the path is a folder's.

    """

    def __init__(self, path: str | Path, *, name: str, stale_after: float = 0) -> None:
        self.path, self._name = Path(path), name
        self._stale_ns = int(stale_after * 1e9)
        self.is_folder = self.path.is_dir()
        self._output: Path | None = None
        self._superseded: set[Path] = set()

    def files(self) -> list[Path]:
        """All files of replicas, the newest first; without a folder the file, if it exists."""
        if not self.is_folder:
            return [self.path] if self.path.exists() else []
        write_times = self._write_times()
        return sorted(write_times, key=lambda path: write_times[path], reverse=True)

    def new_files(self) -> list[Path]:
        """Files in the folder that this replica has neither written nor taken in."""
        if not self.is_folder:
            return []
        paths = self.files()
        self._superseded = self._superseded.intersection(paths)  # threads may read the old one
        return [path for path in paths if path not in self._superseded and path != self._output]

    def note_taken_in(self, path: Path) -> None:
        """What this replica writes from now on has all that is in a file."""
        self._superseded.add(path)

    def write(self, save: Callable[[Path], None]) -> Path:
        """Write this replica's file, and remove those that it makes superfluous.

        `save` writes a file of the path that is returned, whole or not at all.
        """
        if not self.is_folder:
            save(self.path)
            return self.path
        path = self.path / f"{self._name}-{secrets.token_hex(8)}{SUFFIX}"
        save(path)
        old_path, self._output = self._output, path
        if old_path is not None:
            self._superseded.add(old_path)  # if it cannot be removed now
            _remove(old_path)
        self._remove_stale(path)
        return path

    def _remove_stale(self, newest_path: Path) -> None:
        write_times = self._write_times()
        for path in self._superseded & write_times.keys():
            age = abs(write_times.get(newest_path, write_times[path]) - write_times[path])
            if age > self._stale_ns:  # or as far in the future, by a clock that was wrong
                _remove(path)

    def _write_times(self) -> dict[Path, int]:
        """All files in the folder, with the times of their writing, in nanoseconds."""
        write_times = {}
        for path in self.path.glob(f"{self._name}-*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another replica has removed it
                write_times[path] = path.stat().st_mtime_ns
        return write_times


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # another replica has, or a later write tries again
        path.unlink()
