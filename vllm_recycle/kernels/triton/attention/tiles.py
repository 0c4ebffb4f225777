"""How a launch of tree attention is divided: what a program works on, and how many share a context.

All of it depends on shapes and on the kind of device alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

# What stands in for the device where there is none and the interpreter runs.
CPU_PROCESSORS = 4
CPU_CAPABILITY = 9
# Programs that a launch may have for each that runs at a time. It bounds the workspace.
WAVES = 3
# What a program that finds nothing takes, in parts of one that goes over a whole context of some
# thousand tokens, by counting.
EMPTY_COST = 1 / 128


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program of the attention kernel works on, and with what.

    Attributes:
        queries: rows times heads of a group, a power of two from 16.
        tokens: keys and values of an iteration, a power of two from 16.
        warps: of a program.
        stages: of the software pipeline; below 3 every iteration waits for memory.
        resident: programs that a multiprocessor is taken to run at a time.

    """

    queries: int
    tokens: int
    warps: int
    stages: int = 3
    resident: int = 1


@functools.cache
def choose_tile(num_queries: int, head_size: int, *, itemsize: int, capability: int) -> Tile:
    """The tile for so many queries (rows times group) on a device of this major capability.

    The sizes come from compiled kernels: registers, spills, shared memory and instructions, for
    triton 3.7 and 3.8; no timing has gone into them. For Llama's heads (16 bits, head size 128):

        sm_90  128 x 64, 8 warps: 216 registers, 128 KB, wgmma. 128 tokens fill both (249 and
               224 KB); 4 warps spill; 32 tokens fit twice on a multiprocessor, but only with
               registers capped at 128 and with half the width of a wgmma.
        sm_80  128 x 32, 8 warps: 226 registers, 73 KB. 64 tokens are 113 KB, more than the 99 KB
               that all but sm_80 itself have; the same holds for sm_120.

    Two stages would leave room for more, but Triton then issues an iteration's loads at the end of
    the one before and waits for them at once; with three they have a whole iteration.
    """
    block_d = triton.next_power_of_2(head_size)
    queries = min(128, max(16, triton.next_power_of_2(num_queries)))
    if itemsize == 4:  # Without tensor cores: exact, for tests, and slow.
        return Tile(queries=16, tokens=16, warps=4, stages=2)
    is_large = capability in (9, 10)  # 227 KB of shared memory a program, where others have 99.
    if not is_large and block_d > 128:
        queries = min(64, queries)
    tokens = min(64, (8192 if is_large else 4096) // block_d)
    is_full = queries * block_d >= 128 * 128
    warps = 8 if is_full or queries == 128 else 4
    return Tile(queries, tokens, warps, resident=1 if is_full else 2)


@functools.cache
def choose_num_splits(programs: int, num_empty: int, slots: int) -> int:
    """Into how many shares to split every context.

    The fewest with which the time of a launch, in waves of `slots` programs over splits, is within
    an eighth of the best, `WAVES` waves at most.

    Args:
        programs: of a launch that splits nothing, if it is for as many requests as have room.
        num_empty: those of others, which end at once in a step that has these requests alone.
        slots: programs that run at a time.

    """
    shares = range(1, 1 + max(1, WAVES * slots // programs))
    costs = [-(-programs * n // slots) / n + EMPTY_COST * num_empty * n / slots for n in shares]
    return next(n for n, cost in zip(shares, costs, strict=True) if cost <= min(costs) * 1.125)


@functools.cache
def processors_and_capability(device: torch.device) -> tuple[int, int]:
    """Multiprocessors and major compute capability of a device."""
    if device.type != "cuda":
        return CPU_PROCESSORS, CPU_CAPABILITY
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major
