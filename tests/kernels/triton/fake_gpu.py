"""A GPU that Triton compiles for and that is not there: a launch compiles, and is told of.

To be used without TRITON_INTERPRET, in which no launch is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import triton  # noqa: TID253 - for scripts of their own, whose Triton is not to be interpreted
from triton.backends.compiler import GPUTarget  # noqa: TID253
from triton.compiler import CompiledKernel  # noqa: TID253


class Driver:
    """As much of one as Triton asks for."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch  # Triton keeps what it compiled by device.

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def select(arch: int, launched: Callable[..., None]) -> None:
    """From now on launches compile for this compute capability, times ten.

    `launched` gets the compiled kernel, and then what Triton would give to the driver.
    """
    triton.runtime.driver.set_active(Driver(arch))
    CompiledKernel._init_handles = lambda kernel: None
    CompiledKernel.run = property(lambda kernel: partial(launched, kernel))
