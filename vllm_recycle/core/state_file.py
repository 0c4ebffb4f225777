"""Files that outlive an engine: where they may be, how they are written, what they must agree with.

Nobody ever sees half of a file: it is written beside its place, under a name of its own, and then
renamed. The next writer removes what a killed one left behind, once it is old.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

MAX_JSON_BYTES = 1 << 20
LENGTH_BYTES = 8  # of a safetensors file, before its header
PARTIAL_PREFIX = ".vllm_recycle-"
ABANDONED_AFTER = 3600.0  # seconds in which any writer has written more, or is done
DTYPES = {"I32": torch.int32, "I64": torch.int64, "F32": torch.float32, "F64": torch.float64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class StateFileError(OSError):
    """A file that could not be written; one line with its kind, its path and the reason."""


def check_place(
    path: str | Path, *, kind: str, may_be_folder: bool = False, may_be_read_only: bool = False
) -> None:
    """Refuse a path that could not be read, or not be written later, by a ValueError of one line.

    The file need not exist; of a symbolic link it is the target. One is made and removed beside it,
    since permissions do not tell all. With `may_be_folder` it may be a folder to write files in,
    with `may_be_read_only` a file or folder that can only be read.
    """
    description = f"{kind} is {shorten(path)}"
    try:
        if b"\0" in str(path).encode():
            raise ValueError(f"{description}, expected a path without NUL")
        target = Path(os.path.realpath(path))
        is_folder = may_be_folder and target.is_dir()
        if is_folder:
            os.scandir(target).close()
        else:
            _check_file(path, target, description)
        folder = target if is_folder else target.parent
        if not (may_be_read_only and target.exists()):
            with _partial_file(folder):
                pass
    except UnicodeEncodeError:
        raise ValueError(f"{description}, expected a path that UTF-8 can express") from None
    except OSError as error:
        raise ValueError(
            f"{description}, expected one that can be read and written: {error.strerror}"
        ) from error


def _check_file(path: str | Path, target: Path, description: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(target.stat().st_mode):
            raise ValueError(f"{description}, expected a file, not a directory, pipe or device")
        target.open("rb").close()
    if str(path).endswith(os.sep):
        raise ValueError(f"{description}, expected a directory that exists, or a file")
    if not target.parent.is_dir():
        raise ValueError(f"{description}, expected a file in a directory that exists")


def is_writable(path: str | Path) -> bool:
    """Whether a file at the path, or files in the folder there, can be written."""
    try:
        check_place(path, kind="", may_be_folder=True)
    except ValueError:
        return False
    return True


def write_file(path: str | Path, *parts: bytes | memoryview, kind: str) -> None:
    """Put a file of these parts in its place, whole or not at all, or raise StateFileError.

    Of a symbolic link that is its target's.
    """
    target = Path(os.path.realpath(path))
    try:
        with _partial_file(target.parent) as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            Path(file.name).replace(target)
    except OSError as error:
        raise StateFileError(f"{kind} {path}: cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _partial_file(folder: Path) -> Iterator[BinaryIO]:
    """A new file, removed unless it is renamed; those that killed writers left are removed too."""
    path = folder / f"{PARTIAL_PREFIX}{secrets.token_hex(8)}"
    with path.open("xb") as file:
        try:
            _remove_abandoned(folder, path.stat().st_mtime)
            yield file
        finally:
            path.unlink(missing_ok=True)


def _remove_abandoned(folder: Path, folder_time: float) -> None:
    """Remove partial files that are old by the clock of the folder."""
    for path in folder.glob(f"{PARTIAL_PREFIX}*"):
        with contextlib.suppress(OSError):
            if abs(folder_time - path.stat().st_mtime) > ABANDONED_AFTER:
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


@dataclass(frozen=True, slots=True, eq=False)
class TensorForm:
    """What a safetensors file must be like.

    Steps go on while another thread writes or reads it: unlike the functions of safetensors this
    holds the GIL for the header alone.

    Attributes:
        templates: by name, what each tensor must have the type and the shape of; on any device,
            `meta` too.
        facts: what a file is written with, and must have been written with.
        kind: what messages call the file.

    """

    templates: Mapping[str, torch.Tensor]
    facts: Mapping[str, object]
    kind: str

    def save(self, path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors of this form; see `write_file`."""
        metadata = {key: str(value) for key, value in self.facts.items()}
        headers: dict[str, Any] = {"__metadata__": metadata}
        parts, start = [], 0
        # Those of larger numbers first, so that each starts at a multiple of the size of its own.
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
            parts.append(tensor.cpu().contiguous().numpy().data.cast("B"))
            offsets = [start, start := start + len(parts[-1])]
            dtype = DTYPE_NAMES[tensor.dtype]
            headers[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": offsets}
        header = json.dumps(headers).encode()
        header += b" " * (-len(header) % LENGTH_BYTES)
        length = len(header).to_bytes(LENGTH_BYTES, "little")
        write_file(path, length, header, *parts, kind=self.kind)

    def check(self, path: str | Path) -> None:
        """Check a file by its header alone.

        Raises ValueError: no such file, a torn one, or one of other facts, tensors or shapes.
        """
        with self._errors_as_values(path), Path(path).open("rb") as file:
            header_bytes = file.read(LENGTH_BYTES)
            header_bytes += file.read(min(int.from_bytes(header_bytes, "little"), MAX_JSON_BYTES))
            self._check_header(path, header_bytes, os.fstat(file.fileno()).st_size)

    def read(self, path: str | Path) -> dict[str, torch.Tensor]:
        """The tensors of a file, on the CPU, if `check` accepts it.

        The file is not mapped into memory: where a mount loses a file that another host removes, to
        touch its pages would kill the process.
        """
        with self._errors_as_values(path), Path(path).open("rb") as file:
            content = torch.empty(os.fstat(file.fileno()).st_size, dtype=torch.uint8)
            buffer = content.numpy().data
            num_bytes = file.readinto(buffer)
            places = self._check_header(path, buffer[: LENGTH_BYTES + MAX_JSON_BYTES], num_bytes)
            return {
                name: content[places[name]].view(tensor.dtype).view(tensor.shape)
                for name, tensor in self.templates.items()
            }

    def _check_header(
        self, path: str | Path, header_bytes: bytes | memoryview, num_bytes: int
    ) -> dict[str, slice]:
        """See `check`; where each tensor is. `header_bytes` are the first bytes of the file."""
        end = LENGTH_BYTES + int.from_bytes(header_bytes[:LENGTH_BYTES], "little")
        try:
            headers = json.loads(bytes(header_bytes[LENGTH_BYTES:end]))
        except ValueError as error:
            raise RuntimeError(f"its header is not JSON: {error}") from None
        metadata = headers.pop("__metadata__", {})
        for key, expected in self.facts.items():
            if metadata.get(key) != str(expected):
                value = str(metadata.get(key))[:200]
                hint = "; remove it to learn anew" if key == "format" else ""
                raise ValueError(f"{self.kind} {path}: {key} is {value}, expected {expected}{hint}")
        places = {}
        for name, tensor in self.templates.items():
            dtype, shape = headers[name]["dtype"], headers[name]["shape"]
            dtype = DTYPES.get(dtype, dtype)
            if dtype != tensor.dtype or shape != list(tensor.shape):
                raise ValueError(
                    f"{self.kind} {path}: {name} is {dtype} {shape}, expected "
                    f"{tensor.dtype} {list(tensor.shape)}"
                )
            start, stop = headers[name]["data_offsets"]
            if start < 0 or stop - start != tensor.nbytes:
                raise RuntimeError(f"its header has {name} in bytes {start} to {stop}")
            places[name] = slice(end + start, end + stop)
        expected_bytes = end + max(header["data_offsets"][1] for header in headers.values())
        if num_bytes != expected_bytes:
            raise RuntimeError(f"it has {num_bytes:,} bytes, expected {expected_bytes:,}")
        return places

    @contextlib.contextmanager
    def _errors_as_values(self, path: str | Path) -> Iterator[None]:
        """Raise a ValueError of one line for any error of a file: missing, torn, removed since."""
        try:
            if not Path(path).is_file():  # to open a pipe would wait for whoever writes to it
                raise FileNotFoundError("no such file")
            yield
        except ValueError:
            raise
        except Exception as error:
            names = " and ".join(name.replace("_", " ") for name in self.templates)
            raise ValueError(f"{self.kind} {path}: no {names}: {error}") from error


def is_int(value: object, minimum: float = -math.inf, maximum: float = math.inf) -> bool:
    """Whether a value of a file or an option is an integer in these limits; no bool is."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def shorten(value: object, max_length: int = 200) -> str:
    """What a message shows of a value that may be of any size."""
    text = repr(str(value) if isinstance(value, Path) else value)
    return text if len(text) <= max_length else f"{text[:max_length]}... ({len(text):,} characters)"
