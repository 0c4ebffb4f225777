"""How kernels are timed: in CUDA graphs, in alternating rounds, past the L2 cache; and two limits.

Import this before the kernels: where there is no GPU they run in Triton's interpreter, and times
mean nothing. It knows nothing of what is timed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float16  # the interpreter's `tl.dot` lacks the first
ROUNDS = 15 if HAS_GPU else 2
HOST_REPEATS = 200 if HAS_GPU else 1
GRAPH_US = 3000.0  # of one replay, about
MAX_CALLS = 500  # of one graph
L2_BYTES = torch.cuda.get_device_properties(0).L2_cache_size if HAS_GPU else 0
COPIED_BYTES, PRODUCT_SIZE = (2**31, 8192) if HAS_GPU else (2**20, 128)

ROOT = Path(__file__).resolve().parents[2]
# The package need not be installed, and the torch twins are not part of it.
sys.path.insert(0, str(ROOT))
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # it is read when kernels are imported


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def random_ids(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(limit, shape, device=DEVICE)


def count(length: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.arange(length, dtype=dtype, device=DEVICE)


def measure(variants: Mapping[str, Call]) -> dict[str, dict[str, float]]:
    """Microseconds of each variant, with nothing of its inputs in the L2 cache.

    Before every call the cache is filled with something else; what that takes is measured in the
    same rounds and subtracted.
    """
    # Reading leaves no lines behind that must be written back when others take their place.
    fill = random(3 * L2_BYTES // DTYPE.itemsize + 1).amax
    filling = capture(fill)
    timers = {name: capture(partial(in_turn, fill, call)) for name, call in variants.items()}
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        offset = filling() if HAS_GPU else 0.0
        for name, timer in timers.items():
            samples[name].append(timer() - offset)
    return {name: summary(values) for name, values in samples.items()}


def capture(call: Call) -> Callable[[], float]:
    """A graph of so many calls that it takes about `GRAPH_US`; it gives the time of one."""
    if not HAS_GPU:
        return partial(host_us, call)
    call()  # compiles, and allocates what is kept
    num_calls = max(1, min(MAX_CALLS, round(GRAPH_US / device_us(call))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_turn(*[call] * num_calls)
    graph.replay()
    return lambda: device_us(graph.replay) / num_calls


def in_turn(*calls: Call) -> None:
    for call in calls:
        call()


def device_us(work: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def host_us(work: Call) -> float:
    """Wall time until it returns, its launches enqueued on an idle device."""
    samples = []
    for _ in range(HOST_REPEATS):
        if HAS_GPU:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        samples.append((time.perf_counter() - start) * 1e6)
    return statistics.median(samples)


def summary(values: list[float]) -> dict[str, float]:
    p10, *_, p90 = statistics.quantiles(values, n=10, method="inclusive")
    return {"us": statistics.median(values), "p10_us": p10, "p90_us": p90}


@dataclass(frozen=True, slots=True)
class Peaks:
    """The limits of the machine: bytes read and written, and the rate of a matrix product."""

    copy_tb_per_s: float
    product_tflops: float

    def floor_us(self, num_bytes: int, flops: int = 0) -> float:
        return max(num_bytes / self.copy_tb_per_s, flops / self.product_tflops) / 1e6


def measure_peaks() -> Peaks:
    source = random(COPIED_BYTES // DTYPE.itemsize)
    a, b = random(2, PRODUCT_SIZE, PRODUCT_SIZE)
    target, c = torch.empty_like(source), torch.empty_like(a)
    times = measure(
        {"copy": partial(target.copy_, source), "product": partial(torch.mm, a, b, out=c)}
    )
    return Peaks(
        2 * COPIED_BYTES / times["copy"]["us"] / 1e6,
        2 * PRODUCT_SIZE**3 / times["product"]["us"] / 1e6,
    )
