"""What the file of what a method learns must be like, and who writes it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm.logger import init_logger

from vllm_recycle.core.saved_state import SavedState
from vllm_recycle.core.state_file import StateFileError, TensorForm, check_place, is_writable
from vllm_recycle.core.state_place import StatePlace
from vllm_recycle.integration.options import MethodOptions

logger = init_logger("vllm.recycle")
T = TypeVar("T")
PAUSE = 0.001  # seconds between parts of what others wrote
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def rank_file(path: str, data_parallel_index: int) -> str:
    """Where a data-parallel rank keeps what it learns: the first in the file that is named.

    The others beside it: rank 1 in `NAME.dp1.safetensors` where that is `NAME.safetensors`. In a
    folder each engine has a file of its own anyway.
    """
    if not data_parallel_index or Path(path).is_dir():
        return path
    file = Path(path)
    return str(file.with_name(f"{file.stem}.dp{data_parallel_index}{file.suffix}"))


def check_state_file(options: MethodOptions, vllm_config: Any) -> None:
    """Refuse a state file that no engine of this configuration would read, by its header.

    In a folder such a file is passed over. Raises ValueError if it is torn, or not of this model,
    tokenizer and sizes, or could not be written.
    """
    if options.state_file is None:
        return
    # Ranks that have no file start from that of the first, which was checked with the options.
    is_read_only = options.save_every == 0 and not is_writable(options.state_file)
    for rank in range(vllm_config.parallel_config.data_parallel_size):
        path = rank_file(options.state_file, rank)
        if not is_read_only:
            check_place(path, kind="state file", may_be_folder=True)
        if Path(path).is_file():
            model = fingerprint(vllm_config.model_config)
            options.make_state(vllm_config, "meta").form(model, options.state_key).check(path)


def fingerprint(model_config: Any) -> str:
    """What a state file must share with the engine: architecture and tokenizer."""
    digest, hf_config = hashlib.sha256(), model_config.hf_text_config
    sizes = (hf_config.vocab_size, hf_config.hidden_size, hf_config.num_hidden_layers)
    for part in (*(hf_config.architectures or ()), *sizes):
        digest.update(f"{part}\n".encode())
    files = [Path(model_config.tokenizer) / name for name in _TOKENIZER_FILES]
    tokenizer_files = [file for file in files if file.is_file()]
    for file in tokenizer_files:
        digest.update(file.read_bytes())
    if not tokenizer_files:
        digest.update(str(model_config.tokenizer).encode())
    return digest.hexdigest()[:32]


class StateSaver:
    """Writes one state while serving, since whoever ends a worker may kill it.

    To be made by the thread that makes the steps. Another one writes every so many seconds, if
    there was a step, and writes a copy that it takes between two steps, under a lock that steps
    hold while they run on the host. So a step waits at most for that copy; on a GPU for its launch,
    as it is made on the stream of the steps into pinned memory. Before it writes it takes in what
    others have written to the same folder, in parts under the same lock. At the end it does not:
    their files stay, and whoever starts next takes them in.

    Args:
        state: what is written.
        copy: one like it on the CPU, which is overwritten.
        place: where it is written.
        form: of the file.
        every: seconds between saves, 0 for none but those that are asked for.
        reads_others: whether to take in what others write.
    """

    def __init__(
        self,
        state: SavedState,
        copy: SavedState,
        place: StatePlace,
        form: TensorForm,
        *,
        every: float,
        reads_others: bool = True,
    ) -> None:
        self._reads_others = reads_others
        self._state, self._copy, self._place, self._form = state, copy, place, form
        self._stream: torch.cuda.Stream | None = None
        if all(tensor.is_cuda for tensor in state.tensors.values()):
            self._stream = torch.cuda.current_stream()
            for tensor in copy.tensors.values():
                tensor.set_(tensor.pin_memory())  # type: ignore[call-overload]
        # Whoever holds `_saving` may ask for `_changing`, never the other way round.
        self._changing, self._saving = threading.Lock(), threading.Lock()
        self._has_changed = False
        self._saves_at_end = bool(every) or is_writable(place.path)
        if not self._saves_at_end:
            message = "%s %s can only be read: what is learnt is not written"
            logger.info(message, form.kind, place.path)
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
        """Write the state as it is; returns its path, or raises StateFileError."""
        with self._saving:
            try:
                self._take_copy()
                path = self._place.write(lambda path: self._copy.save(path, self._form))
            except Exception as error:
                self._has_changed = True
                if isinstance(error, StateFileError):
                    raise
                # Such as memory that is short for a while.
                raise StateFileError(f"what is learnt cannot be written: {error!r}") from error
        logger.info("vllm_recycle: wrote %s", path)
        return str(path)

    def close(self) -> None:
        """Write what was learnt since it was last written, and end; raises what `save` does."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._has_changed and self._saves_at_end:
            self.save()

    @torch.inference_mode()
    def _take_copy(self) -> None:
        with self._changing, torch.cuda.stream(self._stream):
            for name, tensor in self._state.tensors.items():
                self._copy.tensors[name].copy_(tensor, non_blocking=True)
            self._has_changed = False
            copy_event = self._stream.record_event() if self._stream is not None else None
        if copy_event is not None:
            copy_event.synchronize()

    def _save_every(self, seconds: float) -> None:
        logged: set[str] = set()  # each trouble once, for as long as it lasts
        while not self._ended.wait(seconds):
            troubles = self._exchange()
            for trouble in sorted(troubles - logged):
                logger.error("%s; next try in %g seconds", trouble, seconds)
            logged = troubles

    def _exchange(self) -> set[str]:
        """Take in what others wrote, then write what was learnt; returns what went wrong."""
        troubles: set[str] = set()

        def attempt(work: Callable[..., T], *args: Path) -> T | None:
            try:
                return work(*args)
            except Exception as error:  # whatever a mounted folder does, the next try may work
                troubles.add(str(error) or repr(error))
                return None

        for path in (attempt(self._place.new_files) or []) if self._reads_others else []:
            if self._ended.is_set():  # the last save is to come
                break
            attempt(self._take_in, path)
        if self._has_changed:
            attempt(self.save)
        return troubles

    @torch.inference_mode()
    def _take_in(self, path: Path) -> None:
        """Take in what another replica has written, in parts between which steps go on."""
        try:
            tensors = self._copy.read(path, self._form)
        except ValueError:
            if path.exists():
                raise
            return  # its writer has a newer one
        with self._saving:  # what is written once the file is taken in has all of it
            parts, is_left = self._state.merge(tensors), True
            # Without a pause this thread would have the lock again before a step that waits for it.
            while is_left:
                if self._ended.wait(PAUSE):
                    return
                with self._changing, torch.cuda.stream(self._stream):
                    is_left = next(parts, False)
            self._place.note_taken_in(path)
        logger.debug("vllm_recycle: took in %s", path)
