"""Counts what a step launches on a device, under `v2_shim`; for tests alone.

A launch is a kernel of Triton or an operator of torch, those of vLLM's sampler among them. No
launch are operators that make a view or take memory. Nor are copies from the host seen where the
device is the host; a step that only decodes has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

TAKE_MEMORY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Launches(TorchDispatchMode):
    """Counts launches by part of a step, in the functions that are told to be parts.

    Attributes:
        counts: by part and name.
        part: of the step, where it is now; None where nothing is counted.

    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Counter[str]] = {}
        self.part: str | None = None
        self._is_on = False

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # In inference mode an operator comes here before it is taken apart.
        with self:
            result = operator.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        name = operator.overloadpacket.__name__
        if not operator.is_view and name not in TAKE_MEMORY:
            self._count(name)
        return operator(*args, **(kwargs or {}))

    def within(self, part: str | None, function: Callable) -> Callable:
        """The function, whose launches are those of a part, or of none."""

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            outer = self.part, self._is_on
            mode = nullcontext() if self._is_on else self
            self.part, self._is_on = part, True
            try:
                with mode:
                    return function(*args, **kwargs)
            finally:
                self.part, self._is_on = outer

        return called

    def count_kernels(self) -> None:
        """See those of Triton too; to be called once in a process."""
        from triton.runtime.interpreter import InterpretedFunction

        # What the interpreter does for a kernel is none of a device's.
        run = self.within(None, InterpretedFunction.run)

        def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self._count(kernel.__name__)
            return run(kernel, *args, **kwargs)

        InterpretedFunction.run = launched

    def take(self) -> dict[str, dict[str, int]]:
        """What was counted since the last time."""
        taken = {part: dict(sorted(names.items())) for part, names in sorted(self.counts.items())}
        self.counts = {}
        return taken

    def _count(self, name: str) -> None:
        if self.part is not None:
            self.counts.setdefault(self.part, Counter())[name] += 1
