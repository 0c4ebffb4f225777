"""Where a state lives between engines: in a file, or in a folder that replicas share.

A file has one writer at a time, or the last one wins. In a folder each engine writes a file of its
own, a new one starts from the newest, and all read what the others write. A file there is locked
for as long as its writer lives; those of dead writers go when another has written, which is the
newest then.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from vllm_recycle.core.state_file import remove_abandoned

SUFFIX = ".safetensors"


class StatePlace:
    """A place, and in it the file that this engine writes.

    Args:
        path: of a file that need not exist, or of a folder that does.
        name: what the names of files in the folder begin with, of all that may start from them.

    Attributes:
        is_folder: whether it is one.
        file: what this engine writes.

    """

    def __init__(self, path: str | Path, *, name: str) -> None:
        self._path, self._name = Path(path), name
        self.is_folder = self._path.is_dir()
        self.file = self._path
        if self.is_folder:
            self.file /= f"{name}-{secrets.token_hex(8)}{SUFFIX}"
        self._held: BinaryIO | None = None
        self._read: dict[Path, int] = {}

    def news(self) -> list[Path]:
        """Files in the folder that others have written since this was asked last."""
        written = {path: time for path, time in self._written().items() if path != self.file}
        new = [path for path, time in written.items() if self._read.get(path) != time]
        self._read = written
        return new if self.is_folder else []

    def candidates(self) -> list[Path]:
        """The files to start from, the newest first."""
        if not self.is_folder:
            return [self._path] if self._path.exists() else []
        written = self._written()
        return sorted(written, key=lambda path: written[path], reverse=True)

    def _written(self) -> dict[Path, int]:
        """All files in the folder, with when they were written."""
        written = {}
        for path in self._path.glob(f"{self._name}-*{SUFFIX}"):
            with contextlib.suppress(OSError):  # its writer is dead, another has written
                written[path] = path.stat().st_mtime_ns
        return written

    def write(self, save: Callable[[Path], None]) -> Path:
        """Write this engine's file, and remove those in the folder whose writers are dead.

        `save` writes a file of the path that is returned, whole or not at all.
        """
        save(self.file)
        if self.is_folder:
            self._hold()
            for path in self.candidates():
                if path != self.file:
                    remove_abandoned(path)
        return self.file

    def close(self) -> None:
        """This engine writes no more."""
        if self._held is not None:
            self._held.close()

    def _hold(self) -> None:
        # Who finds the file before it is locked removes it, having just written one.
        with contextlib.suppress(OSError):
            held = self.file.open("rb")
            self.close()
            self._held = held
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
