"""A GPU that Triton compiles for and that is not there: a launch compiles, and is told of.

To be used without TRITON_INTERPRET, in which no launch is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import triton  # noqa: TID253 - for scripts of their own, whose Triton is not to be interpreted
from triton.backends.compiler import GPUTarget  # noqa: TID253
from triton.compiler import CompiledKernel  # noqa: TID253


def select(arch: int, launched: Callable[..., None]) -> None:
    """From now on launches compile for this compute capability, times ten.

    `launched` gets the compiled kernel, and then what Triton would give to the driver.
    """
    driver = SimpleNamespace(
        get_current_device=lambda: arch,  # Triton keeps what it compiled by device
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )
    triton.runtime.driver.set_active(driver)
    CompiledKernel._init_handles = lambda kernel: None
    CompiledKernel.run = property(lambda kernel: partial(launched, kernel))
