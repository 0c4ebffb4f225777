"""Launches that are made again and again, with few of their arguments new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Bytes: Triton compiles a pointer that is divisible by it in another way than one that is not.
ALIGNMENT = 16


def bind(
    kernel: Any, grid: tuple[int, int, int], known: dict[str, Any], **options: int
) -> Callable[[dict[str, Any]], None]:
    """A launch, to be called with the arguments that are not known yet, by name.

    Of the first call Triton looks at every argument to find what it has compiled for such, which
    takes longer than the launch. The others take that as it is: their tensors must be of the same
    types, and aligned alike.

    Args:
        kernel: a `triton.jit` function.
        grid: of its programs.
        known: arguments by name, constants among them; others are passed over.
        options: `num_warps`, `num_stages`.

    """
    arguments = {name: known.get(name) for name in kernel.arg_names}
    compiled: Any = None  # as it stays in the interpreter

    def launch(given: dict[str, Any]) -> None:
        nonlocal compiled
        if compiled is None:
            compiled = kernel[grid](**(arguments | given), **options)
        else:
            compiled[grid](*(arguments | given).values())

    return launch
