"""Small kernels on PTX, whose results are known, and some whose defects are to be found.

Left out without `PTX_ARCH`: Triton does not compile where it interprets.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import triton  # noqa: TID253
import triton.language as tl  # noqa: TID253

from tests.kernels.triton import test_grow
from tests.kernels.triton.ptx import launch
from tests.kernels.triton.ptx.faults import AccessError, HangError
from tests.kernels.triton.ptx.machine import Machine
from tests.kernels.triton.ptx.parser import parse
from vllm_recycle.core.tree import load_tree
from vllm_recycle.kernels.triton.matrix import fill

ARCH = int(os.environ.get("PTX_ARCH", "0"))
pytestmark = pytest.mark.skipif(not ARCH, reason="needs PTX_ARCH")


def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-1000, 1000, shape, generator=generator).to(dtype)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@triton.jit
def _reduce_kernel(given, out, n: tl.constexpr, k: tl.constexpr):
    lane = tl.arange(0, n)
    values = tl.load(given + lane)
    tl.store(out, tl.sum(values, 0))
    tl.store(out + 1, tl.max(values, 0))
    tl.store(out + 2, tl.min(values, 0))
    tl.store(out + 3 + tl.arange(0, k), tl.topk(values, k))
    tl.store(out + 3 + k + lane, tl.flip(values, 0))


@pytest.mark.parametrize(("dtype", "warps"), [(torch.int32, 4), (torch.int64, 1)])
def test_reductions(dtype, warps):
    given, out = integers(64, dtype=dtype), torch.zeros(3 + 8 + 64, dtype=dtype)
    _reduce_kernel[(1,)](given, out, 64, 8, num_warps=warps)
    top = given.sort(descending=True).values[:8]
    expected = [given.sum()[None], given.max()[None], given.min()[None], top]
    assert out.equal(torch.cat([*expected, given.flip(0)]).to(dtype))


@triton.jit
def _compute_kernel(a, b, x, y, out, halves, n: tl.constexpr):
    lane = tl.arange(0, n)
    a, b = tl.load(a + lane), tl.load(b + lane)
    x, y = tl.load(x + lane), tl.load(y + lane)
    tl.store(out + lane, (a // b + a * b - (a ^ b)).to(tl.float32))
    tl.store(out + n + lane, (a >> (b & 7)).to(tl.float32))
    tl.store(out + 2 * n + lane, tl.exp2(x) + x / y)
    tl.store(out + 3 * n + lane, tl.fma(x, y, x))
    tl.store(out + 4 * n + lane, tl.where(x > y, (10 * x).to(tl.int32), -1).to(tl.float32))
    tl.store(halves + lane, x.to(tl.bfloat16))


def test_arithmetic():
    a, b, x, y = integers(128), integers(128).abs() + 1, numbers(128), numbers(1, 128)[0]
    out, halves = torch.zeros(5, 128), torch.zeros(128, dtype=torch.bfloat16)
    _compute_kernel[(1,)](a, b, x, y, out, halves, 128)
    quotients = a.div(b, rounding_mode="trunc") + a * b - (a ^ b)
    assert out[:2].equal(torch.stack([quotients, a >> (b & 7)]).float())
    torch.testing.assert_close(out[2], x.exp2() + x / y, rtol=1e-6, atol=1e-6)
    assert out[3].equal((x.double() * y.double() + x.double()).float())
    assert out[4].equal(torch.where(x > y, (10 * x).int(), -1).float())
    assert halves.equal(x.bfloat16())


@triton.jit
def _atomic_kernel(given, out, n: tl.constexpr):
    values = tl.load(given + tl.program_id(0) * n + tl.arange(0, n))
    tl.atomic_add(out + values % 7, 1, sem="relaxed")
    tl.atomic_max(out + 8 + values % 7, values, sem="relaxed")


def test_programs_add_with_atomics():
    given, out = integers(4 * 128).abs(), torch.zeros(16, dtype=torch.int32)
    _atomic_kernel[(4,)](given, out, 128)
    counts = [int((given % 7 == rest).sum()) for rest in range(7)]
    largest = [int(given[given % 7 == rest].max()) for rest in range(7)]
    assert out.tolist() == [*counts, 0, *largest, 0]


@triton.jit
def _add_kernel(given, out):
    tl.store(out, tl.load(out) + tl.load(given + tl.program_id(0)))


def test_programs_that_add_without_atomics_race():
    with pytest.raises(launch.FindingError, match="race between programs on out"):
        _add_kernel[(4,)](integers(4), torch.zeros(1, dtype=torch.int32))


@triton.jit
def _halve_kernel(given, out):
    number, steps = tl.load(given + tl.program_id(0)), 0
    while number != 1:
        number = tl.where(number % 2 == 0, number // 2, 3 * number + 1)
        steps += 1
    tl.store(out + tl.program_id(0), steps)


def impatient_machine(kernel: Any) -> Machine:
    return Machine(parse(kernel.asm["ptx"]), kernel.metadata.shared, max_steps=1000)


def test_a_loop_ends_when_it_should_and_a_kernel_without_an_end_hangs(monkeypatch):
    given, out = torch.arange(1, 9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    _halve_kernel[(8,)](given, out)
    assert out.tolist() == [0, 1, 7, 2, 5, 8, 16, 3]
    monkeypatch.setattr(launch, "machine_of", impatient_machine)
    with pytest.raises(HangError, match="no end after 1000 steps"):
        _halve_kernel[(1,)](torch.zeros(1, dtype=torch.int32), out)


@triton.jit
def _turn_kernel(given, out, scratch, n: tl.constexpr, waits: tl.constexpr):
    lane = tl.arange(0, n)
    tl.store(scratch + lane, tl.load(given + lane))
    if waits:
        tl.debug_barrier()
    tl.store(out + lane, tl.load(scratch + n - 1 - lane))


def test_a_missing_barrier_is_found():
    given = integers(256)
    out, scratch = torch.zeros_like(given), torch.zeros_like(given)
    _turn_kernel[(1,)](given, out, scratch, 256, True)
    assert out.equal(given.flip(0))
    with pytest.raises(launch.FindingError, match="race between warps on scratch"):
        _turn_kernel[(1,)](given, out, torch.zeros_like(given), 256, False)


@triton.jit
def _shift_kernel(given, out, n: tl.constexpr):
    tl.store(out + tl.arange(0, n), tl.load(given + 1 + tl.arange(0, n)))


def test_reads_behind_a_tensor_and_behind_its_buffer_are_found():
    given, out = integers(129), torch.zeros(128, dtype=torch.int32)
    _shift_kernel[(1,)](given, out, 128)
    assert out.equal(given[1:])
    with pytest.raises(AccessError, match="in its storage, but of no tensor"):
        _shift_kernel[(1,)](given[:128], out, 128)
    with pytest.raises(AccessError, match="lie in no tensor"):
        _shift_kernel[(1,)](given[:128].clone(), out, 128)


@triton.jit
def _dot_kernel(a, b, out, count, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr):
    row, column, inner = tl.arange(0, m)[:, None], tl.arange(0, n)[None, :], tl.arange(0, k)
    total = tl.zeros([m, n], tl.float32)
    for step in range(count):
        left = tl.load(a + row * (k * count) + step * k + inner[None, :])
        right = tl.load(b + (step * k + inner)[:, None] * n + column)
        total = tl.dot(left, right, total)
    tl.store(out + row * n + column, total)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [32, 64])
def test_products_of_matrices(dtype, m):
    a, b = numbers(m, 5 * 32, dtype=dtype), numbers(5 * 32, 32, dtype=dtype)
    out = torch.zeros(m, 32)
    compiled = _dot_kernel[(1,)](a, b, out, 5, m, 32, 32, num_stages=3)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-4)
    assert ("wgmma" in compiled.asm["ptx"]) == (ARCH == 90 and m == 64)


def test_a_barrier_taken_away_from_a_kernel_is_found(monkeypatch):
    """That between levels of a template, whose contexts other threads have written."""
    lines = Path(fill.__file__).read_text().splitlines()
    line = next(at for at, text in enumerate(lines, 1) if "debug_barrier" in text)

    def without_barrier(kernel: Any) -> Machine:
        parsed = parse(kernel.asm["ptx"])
        for instruction in parsed.instructions:
            if instruction.source.startswith(f"fill.py:{line}:"):
                assert instruction.parts == ["bar", "sync"]
                instruction.parts = ["fence"]
        return Machine(parsed, kernel.metadata.shared)

    setting = test_grow.random_setting(8, (1,), max_nodes=80, beam=16, levels=8)
    test_grow.check_filled(setting, load_tree("default"))
    monkeypatch.setattr(launch, "machine_of", without_barrier)
    with pytest.raises(launch.FindingError, match="_fill_kernel\nrace between warps on"):
        test_grow.check_filled(setting, load_tree("default"))
