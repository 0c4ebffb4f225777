"""How long our kernels took to compile, of those that Triton's cache did not have."""

from __future__ import annotations

from typing import Any

import triton

SECONDS: list[float] = []  # of each kernel that this process compiled


def _note(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
    module = getattr(getattr(src, "fn", None), "module", "")
    if not cache_hit and module.startswith(f"{__package__}."):
        SECONDS.append(times.total / 1e6)


triton.knobs.compilation.listener = triton.knobs.compilation.listener or _note


def describe_compiling() -> str | None:
    """Kernels and seconds, if there were any."""
    return f"compiled {len(SECONDS)} kernels in {sum(SECONDS):.1f} s" if SECONDS else None
