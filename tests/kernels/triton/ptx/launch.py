"""Launches of Triton kernels on tensors in the CPU's memory: compiled to PTX, and interpreted.

To be used without TRITON_INTERPRET. What `kernel[grid](...)` changes are the tensors that it was
given, as on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from triton import knobs  # noqa: TID253
from triton.backends.nvidia.compiler import CUDABackend  # noqa: TID253

from tests.kernels.triton import fake_gpu
from tests.kernels.triton.ptx.machine import Machine
from tests.kernels.triton.ptx.memory import Region
from tests.kernels.triton.ptx.parser import parse
from vllm_recycle.kernels.triton.paged_layers import PagedLayers

# A program may read a stamp that the winner's program sets to 0 meanwhile: neither 0 nor the
# winner's number is its own.
HARMLESS = re.compile(r"race between programs on stamps, .* at learn\.py")


class FindingError(AssertionError):
    """What a GPU would go on with: races, and branches that a part of the threads takes."""


def select(arch: int) -> None:
    """From now on launches run in the interpreter for this compute capability, times ten.

    Launches raise what a `Machine` raises, and `FindingError`.
    """
    # Not with what is compiled to the end, which Triton would take for the same.
    knobs.cache.dir = str(Path(knobs.cache.dir) / "ptx")
    CUDABackend.make_cubin = lambda *args, **kwargs: b""  # PTX is enough: no ptxas.
    layers: list[torch.Tensor] = []  # of which kernels are given the addresses alone
    make = PagedLayers.make

    def make_layers(kv_caches: Sequence[torch.Tensor]) -> PagedLayers:
        layers[:] = kv_caches
        return make(kv_caches)

    PagedLayers.make = make_layers
    fake_gpu.select(arch, partial(_launched, layers))


@lru_cache(32)
def machine_of(kernel: Any) -> Machine:
    """Of a compiled kernel; those that were launched last are kept."""
    return Machine(parse(kernel.asm["ptx"]), kernel.metadata.shared)


def _launched(layers: list[torch.Tensor], kernel: Any, *given: Any) -> None:
    # The grid; the stream, and what is the kernel's or a hook's; and the arguments.
    grid, arguments = given[:3], dict(zip(kernel.src.signature, given[9:], strict=True))
    tensors = {f"layer {index}": layer for index, layer in enumerate(layers)}
    values = []
    for name, type in kernel.src.signature.items():
        if isinstance(arguments[name], torch.Tensor):
            tensors[name] = arguments[name]
            values.append(tensors[name].data_ptr())
        elif type != "constexpr":
            values.append(arguments[name] or 0)
    machine = machine_of(kernel)
    scratch = [0] * (len(machine.kernel.parameters) - len(values))  # Triton's own
    findings = machine.run(regions_of(tensors), grid, [*values, *scratch]).findings
    unknown = [text for text in findings if not HARMLESS.match(text)]
    if unknown:
        raise FindingError("\n".join([kernel.name, *unknown]))


def regions_of(tensors: dict[str, torch.Tensor]) -> list[Region]:
    """Their storages, of which the bytes from a tensor's first to its last may be touched."""
    of_storages: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            of_storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    regions = []
    for start, names in of_storages.items():
        views = [tensors[name] for name in names]
        content = torch.empty(0, dtype=torch.uint8).set_(views[0].untyped_storage()).numpy()
        grain = min(view.element_size() for view in views)
        region = Region("/".join(names), start, content, grain)
        for view in views:
            first, sizes = view.data_ptr() - start, zip(view.shape, view.stride(), strict=True)
            reach = 1 + sum((size - 1) * stride for size, stride in sizes)
            region.parts.append((first, first + reach * view.element_size()))
        regions.append(region)
    return regions
