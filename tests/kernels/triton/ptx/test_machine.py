"""The interpreter of PTX on PTX: what it finds, and a kernel that hangs on GPUs."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.triton.ptx.faults import AccessError, HangError, UnsupportedError
from tests.kernels.triton.ptx.machine import Machine
from tests.kernels.triton.ptx.memory import Memory, Region
from tests.kernels.triton.ptx.parser import parse

HEADING = """
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 64
{
	.reg .pred 	%p<2>;
	.reg .b32 	%r<4>;
	.reg .b64 	%rd<4>;
	mov.u32 %r0, %tid.x;
	ld.param.b64 %rd0, [kernel_param_0];
	mad.wide.u32 %rd1, %r0, 4, %rd0;
	shl.b32 %r1, %r0, 2;
	mov.b32 %r2, global_smem;
	add.s32 %r2, %r2, %r1;
	setp.lt.u32 %p0, %r0, 48;
"""


def run(body: str, length: int = 64) -> tuple[np.ndarray, Memory]:
    """Two warps on a tensor of int32; what is in it then, and what was found."""
    tensor = np.zeros(length + 16, np.int32)
    start = -tensor.ctypes.data % 16 // 4
    values = tensor[start : start + length]
    address = values.ctypes.data
    region = Region("tensor", address, values.view(np.uint8), 4)
    region.parts = [(0, 4 * length)]
    machine = Machine(parse(f"{HEADING}{body}\n\tret;\n}}\n"), shared=256, max_steps=10_000)
    return values, machine.run([region], (1, 1, 1), [address])


ROTATED = """
	st.shared.b32 [%r2], %r0;
	{barrier}
	xor.b32 %r1, %r1, {distance};
	mov.b32 %r3, global_smem;
	add.s32 %r3, %r3, %r1;
	ld.shared.b32 %r3, [%r3];
	st.global.b32 [%rd1], %r3;
"""


@pytest.mark.parametrize(
    ("barrier", "distance", "race"),
    [
        ("bar.sync 0;", 32, ""),
        ("bar.sync 0;", 128, ""),
        ("bar.warp.sync -1;", 32, ""),
        ("bar.warp.sync -1;", 128, "race between warps on shared memory"),
        ("", 32, "unordered within a warp on shared memory"),
    ],
)
def test_what_other_threads_wrote_is_read_behind_a_barrier(barrier, distance, race):
    values, memory = run(ROTATED.format(barrier=barrier, distance=distance))
    assert values.tolist() == [lane ^ (distance // 4) for lane in range(64)]
    assert [text.startswith(race) for text in memory.findings] == [True] * bool(race)


def test_shared_memory_that_nobody_wrote_is_not_read():
    with pytest.raises(
        AccessError, match=r"shared memory at byte 0 was never written \(64 lanes\)"
    ):
        run("ld.shared.b32 %r3, [%r2];")


def test_a_tensor_is_not_left():
    with pytest.raises(AccessError, match=r"\+80 of 80 bytes\); 44 of 64 lanes"):
        run("st.global.b32 [%rd1], %r0;", length=20)
    with pytest.raises(AccessError, match="not aligned"):
        run("st.global.b32 [%rd1+2], %r0;")


def test_what_never_ends_hangs():
    with pytest.raises(HangError, match="no end after 10000 steps"):
        run("$L__again:\nbra.uni $L__again;")


def test_threads_that_part_come_together_again():
    values, memory = run("@%p0 bra $L__end;\nst.global.b32 [%rd1], %r0;\n$L__end:\n")
    assert values.tolist() == [0] * 48 + list(range(48, 64))
    (text,) = memory.findings
    assert "threads part, 48 of 64 take the branch: PTX line" in text


@pytest.mark.parametrize(
    ("waits", "place"), [("bar.sync 0;", "bar.sync 0"), ("bar.warp.sync -1;", "bar.warp.sync -1")]
)
def test_lanes_that_part_at_a_barrier_hang(waits, place):
    """The second half of the last warp; the first half waits for it elsewhere."""
    with pytest.raises(HangError, match="all threads wait") as caught:
        run(f"@%p0 bra $L__end;\n{waits}\n$L__end:\nbar.warp.sync -1;\nbar.sync 0;")
    lines = str(caught.value).splitlines()
    assert any("warp 1, lanes 16-31" in line and place in line for line in lines)
    assert any("warp 1, lanes 0-15" in line and "bar.warp.sync -1" in line for line in lines)


def test_an_instruction_that_is_not_known_is_named():
    with pytest.raises(UnsupportedError, match=r"PTX line \d+: sin.approx.f32 %r1, %r2"):
        run("sin.approx.f32 %r1, %r2;")


def test_a_kernel_that_hung_hangs():
    """Growing trees as Triton 3.6.0 compiled it for sm_90 when it still hung there.

    Lanes 16 to 31 summed over wrong lanes whether the tree was full, and went on to a barrier of
    another level; the others left the loop. The files are the kernel of the commit before
    `21877b1`, launched by `test_any_sizes_equal_python` of its `test_grow.py` with 63 nodes of 12
    levels, a beam of 16, k 8 and contexts of 1, 2, 4 and 16: the PTX without its debugging
    sections, and what the launch was given. With Triton 3.7.1 and 3.8.0 it does not hang.
    """
    folder = Path(__file__).parent
    kernel = parse(gzip.decompress((folder / "hanging_grow.ptx.gz").read_bytes()).decode())
    given = np.load(folder / "hanging_grow.npz")
    tensors, values = [], []
    for name in kernel.parameters:
        value = given[name]
        if value.ndim:
            tensors.append(Region(name, value.ctypes.data, value.view(np.uint8), value.itemsize))
            tensors[-1].parts = [(0, value.nbytes)]
        values.append(value.ctypes.data if value.ndim else value.item())
    machine = Machine(kernel, int(given["shared"]))
    with pytest.raises(HangError, match="all threads wait") as caught:
        machine.run(tensors, tuple(given["grid"].tolist()), values)
    lines = str(caught.value).splitlines()
    assert any("lanes 16-31" in line and "bar.sync 0 " in line for line in lines)
    assert any("lanes 0-15" in line and "bar.warp.sync" in line for line in lines)
