"""Launches of our kernels by an engine in Triton's interpreter, to be compiled afterwards.

`Recorder` keeps each launch once by what Triton tells compiled forms of a kernel apart: constants,
which arguments there are and of what type, which numbers are 1, and what is divisible by 16.
"""

from __future__ import annotations

from typing import Any

import torch

# Where the kernel is from, its name, and what it is given; for `compile_kernels`.
Launch = tuple[str, str, dict[str, Any]]


class Recorder:
    """In the process with the engine: the launches, by a text that tells them apart."""

    def __init__(self) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        self.seen: dict[str, Launch] = {}
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
                odd = value.data_ptr() % 16 != 0
                kept[name] = torch.zeros(32, dtype=value.dtype)[int(odd) :]
                kinds[name] = f"{value.dtype}, {odd and name not in unaligned}"
            elif type(value) is int and not is_constant:
                kinds[name] = "int" if name in free else f"int, {value == 1}, {value % 16 == 0}"
            else:
                kinds[name] = type(value).__name__ if isinstance(value, float) else repr(value)
        self.seen[f"{kernel.__name__} {kinds}"] = (kernel.fn.__module__, kernel.__name__, kept)

    def take(self) -> dict[str, Launch]:
        """What was launched since the last time."""
        taken, self.seen = self.seen, {}
        return taken
