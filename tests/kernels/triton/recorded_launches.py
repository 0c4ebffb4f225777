"""Launches of our kernels by an engine in Triton's interpreter, to be compiled afterwards.

`Recorder` keeps each launch once by what Triton tells compiled forms of a kernel apart: constants,
which arguments there are and of what type, which numbers are 1, and what is divisible by 16.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Tensor(NamedTuple):
    """What stands for a tensor."""

    dtype: torch.dtype
    is_aligned: bool

    def make(self) -> torch.Tensor:
        first = 0 if self.is_aligned else 1
        return torch.zeros(32, dtype=self.dtype)[first:]


class Recorder:
    """In the process with the engine: the launches, by a text that tells them apart."""

    def __init__(self) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        self.seen: dict[str, tuple[str, str, dict[str, Any]]] = {}
        run = InterpretedFunction.run

        def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if kernel.fn.__module__.startswith("vllm_recycle"):
                self._keep(kernel, args, kwargs)
            return run(kernel, *args, **kwargs)

        InterpretedFunction.run = launched

    def _keep(self, kernel: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        del given["grid"], given["warmup"]
        free = kernel.kwargs.get("do_not_specialize") or ()
        unaligned = (*free, *(kernel.kwargs.get("do_not_specialize_on_alignment") or ()))
        hints = kernel.fn.__annotations__
        kinds, kept = {}, {}
        for name, value in given.items():
            is_constant = "constexpr" in str(hints.get(name, "constexpr"))
            kept[name] = value
            if isinstance(value, torch.Tensor):
                aligned = name not in unaligned and value.data_ptr() % 16 == 0
                kept[name] = Tensor(value.dtype, value.data_ptr() % 16 == 0)
                kinds[name] = f"{value.dtype}, {aligned}"
            elif type(value) is int and not is_constant:
                kinds[name] = "int" if name in free else f"int, {value == 1}, {value % 16 == 0}"
            else:
                kinds[name] = type(value).__name__ if isinstance(value, float) else repr(value)
        function = kernel.fn
        self.seen[f"{kernel.__name__} {kinds}"] = (function.__module__, function.__name__, kept)

    def write(self, file: Path) -> None:
        file.write_bytes(pickle.dumps(list(self.seen.values())))


def read(file: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each launch: the kernel's name, and what makes it."""
    for module, name, given in pickle.loads(file.read_bytes()):
        made = {
            key: value.make() if isinstance(value, Tensor) else value
            for key, value in given.items()
        }
        yield name, partial(getattr(import_module(module), name)[(1, 1, 1)], **made)
