"""Files that outlive an engine: where they may be, how they are written, what they must agree with.

Nobody ever sees half of a file: it is written beside its place, under a name of its own, and then
renamed. That name is locked for as long as its writer lives, so that what a killed one left behind
is known by its lock being free, whichever machine or container it was on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

MAX_JSON_BYTES = 1 << 20
PARTIAL_PREFIX = ".vllm_recycle-"
DTYPES = {"I32": torch.int32, "I64": torch.int64, "F32": torch.float32, "F64": torch.float64}


class StateFileError(OSError):
    """A file that could not be written; one line with its kind, its path and the reason."""


def check_place(path: str | Path, *, kind: str, may_be_folder: bool = False) -> None:
    """Refuse a path that could not be read, or not be written later, by a ValueError of one line.

    The file need not exist; of a symbolic link it is the target. One is made and removed beside it,
    since permissions do not tell all. With `may_be_folder` it may be a folder to write files in.
    """
    named = f"{kind} is {shorten(path)}"
    try:
        if b"\0" in str(path).encode():
            raise ValueError(f"{named}, expected a path without NUL")
        target = Path(os.path.realpath(path))
        if may_be_folder and target.is_dir():
            with _partial_file(target):
                return
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(target.stat().st_mode):
                raise ValueError(f"{named}, expected a file, not a directory, pipe or device")
            target.open("rb").close()
        if str(path).endswith(os.sep):
            raise ValueError(f"{named}, expected a directory that exists, or a file")
        if not target.parent.is_dir():
            raise ValueError(f"{named}, expected a file in a directory that exists")
        with _partial_file(target.parent):
            pass
    except UnicodeEncodeError:
        raise ValueError(f"{named}, expected a path that UTF-8 can express") from None
    except OSError as error:
        raise ValueError(
            f"{named}, expected one that can be read and written: {error.strerror}"
        ) from error


def write_file(path: str | Path, content: bytes, *, kind: str) -> None:
    """Put a file in its place, whole or not at all, or raise StateFileError.

    Of a symbolic link that is its target's.
    """
    target = Path(os.path.realpath(path))
    try:
        with _partial_file(target.parent) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            Path(file.name).replace(target)
    except OSError as error:
        raise StateFileError(f"{kind} {path}: cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _partial_file(folder: Path) -> Iterator[BinaryIO]:
    """A new file to be renamed, removed where it was not; before it, what killed writers left."""
    for left in folder.glob(f"{PARTIAL_PREFIX}*"):
        remove_abandoned(left)
    while True:
        path = folder / f"{PARTIAL_PREFIX}{secrets.token_hex(8)}"
        with path.open("xb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if not path.exists():
                continue  # somebody took it for a killed writer's before it was locked
            try:
                yield file
            finally:
                path.unlink(missing_ok=True)
            return


def remove_abandoned(path: Path) -> None:
    """Remove a file that its writer holds a lock on while it lives, where that is free."""
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Not what its writer has put in its place meanwhile.
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    path.unlink()


def read_json(path: str | Path, *, kind: str) -> Any:
    """What a JSON file says; ValueError, of one line, where it is too large, or none."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
        if len(text) > MAX_JSON_BYTES:
            raise ValueError(f"more than {MAX_JSON_BYTES:,} bytes")
        return json.loads(text)
    except OSError as error:
        raise ValueError(f"{kind} {path}: cannot be read: {error.strerror}") from error
    except RecursionError:
        raise ValueError(f"{kind} {path}: not JSON: nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{kind} {path}: not JSON: {error}") from error


def save_tensors(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    facts: Mapping[str, object],
    kind: str,
) -> None:
    """Write tensors as safetensors, with the facts that `open_tensors` checks; see `write_file`."""
    metadata = {key: str(value) for key, value in facts.items()}
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_file(path, save(on_cpu, metadata), kind=kind)


@contextlib.contextmanager
def open_tensors(
    path: str | Path,
    like: Mapping[str, torch.Tensor],
    *,
    facts: Mapping[str, object],
    kind: str,
) -> Iterator[Any]:
    """A file that `save_tensors` wrote, for `get_tensor` to read; its header is checked.

    Args:
        path: of the file.
        like: by name, what each tensor must have the type and the shape of; on any device, `meta`
            too.
        facts: what the file must have been written with.
        kind: what messages call the file.

    Raises:
        ValueError: no such file, a torn one, or one of other facts, tensors or shapes.

    """
    nothing = f"{kind} {path}: no {' and '.join(name.replace('_', ' ') for name in like)}: "
    if not Path(path).is_file():  # to open a pipe would wait for whoever writes to it
        raise ValueError(f"{nothing}no such file")
    try:
        with safe_open(str(path), "pt") as file:
            got = file.metadata() or {}
            for key, expected in facts.items():
                if got.get(key) != str(expected):
                    found = str(got.get(key))[:200]
                    hint = "; remove it to learn anew" if key == "format" else ""
                    raise ValueError(f"{kind} {path}: {key} is {found}, expected {expected}{hint}")
            for name, tensor in like.items():
                one = file.get_slice(name)
                dtype, shape = DTYPES.get(one.get_dtype(), one.get_dtype()), one.get_shape()
                if dtype != tensor.dtype or shape != list(tensor.shape):
                    raise ValueError(
                        f"{kind} {path}: {name} is {dtype} {shape}, expected "
                        f"{tensor.dtype} {list(tensor.shape)}"
                    )
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{nothing}{error}") from error


def is_int(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether a value of a file or an option is an integer from `low` to `high`; no bool is."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def shorten(value: object, most: int = 200) -> str:
    """What a message shows of a value that may be of any size."""
    text = repr(str(value) if isinstance(value, Path) else value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"
