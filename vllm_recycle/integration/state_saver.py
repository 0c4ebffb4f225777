"""What was learnt is written while serving, since whoever ends a worker may kill it.

A thread writes it every so many seconds, if there was a step. What it writes is a copy that it
takes between two steps, under a lock that steps hold while they run on the host. So a step waits at
most for that copy; on a GPU for its launch, as it is made on the stream of the steps into pinned
memory, where it takes the time of the bytes on the bus.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from vllm.logger import init_logger

from vllm_recycle.core.saved_state import KIND, SavedState
from vllm_recycle.core.state_file import StateFileError
from vllm_recycle.core.state_place import StatePlace

logger = init_logger("vllm.recycle")


class StateSaver:
    """Writes one state; to be made by the thread that makes the steps.

    Args:
        state: what is written.
        copy: one like it on the CPU, which is overwritten.
        place: where it is written.
        fingerprint: of the model, which the file has.
        kind: what messages call the file.
        every: seconds between saves, 0 for none but those that are asked for.
    """

    def __init__(
        self,
        state: SavedState,
        copy: SavedState,
        place: StatePlace,
        *,
        fingerprint: str,
        kind: str = KIND,
        every: float,
    ) -> None:
        self._state, self._copy, self._place = state, copy, place
        self._fingerprint, self._kind = fingerprint, kind
        self._stream: torch.cuda.Stream | None = None
        if all(tensor.is_cuda for tensor in state.tensors.values()):
            self._stream = torch.cuda.current_stream()
            for tensor in copy.tensors.values():
                tensor.set_(tensor.pin_memory())  # type: ignore[call-overload]
        self._changing, self._saving = threading.Lock(), threading.Lock()
        self._has_changed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._save_every, args=(every,), name="draft state", daemon=True
        )
        if every:
            self._thread.start()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """To be held by whoever changes the state."""
        with self._changing:
            self._has_changed = True
            yield

    def save(self) -> str:
        """Write the state as it is; returns the path of its file.

        Raises:
            StateFileError: it cannot be written.
        """
        with self._saving:
            try:
                self._take_copy()
                path = self._place.write(self._save_copy)
            except Exception as error:
                self._has_changed = True
                if isinstance(error, StateFileError):
                    raise
                # Such as memory that is short for a while.
                raise StateFileError(f"what is learnt cannot be written: {error!r}") from error
        logger.info("vllm_recycle: wrote %s", path)
        return str(path)

    def close(self) -> None:
        """Write what was learnt since it was last written, and end.

        Raises:
            StateFileError: it cannot be written.
        """
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            if self._has_changed:
                self.save()
        finally:
            self._place.close()

    @torch.inference_mode()
    def _take_copy(self) -> None:
        with self._changing, torch.cuda.stream(self._stream):
            for name, tensor in self._state.tensors.items():
                self._copy.tensors[name].copy_(tensor, non_blocking=True)
            self._has_changed = False
            taken = self._stream.record_event() if self._stream is not None else None
        if taken is not None:
            taken.synchronize()

    def _save_copy(self, path: Path) -> None:
        self._copy.save(path, fingerprint=self._fingerprint, kind=self._kind)

    def _save_every(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            if self._has_changed:
                try:
                    self.save()
                except StateFileError as error:
                    logger.error("%s; next try in %g seconds", error, seconds)
