"""Runs the programs of a kernel's grid, instruction after the other, on the CPU.

The threads of a program are the elements of NumPy arrays, and each has a program counter. Those
with the smallest one go on until they meet the next smallest: so threads that parted come together
again where the code does. Threads that wait, at a barrier or for lanes of their warp, are passed
over; where all that are left wait, the kernel hangs.

What a GPU would go on with is kept in `Memory.findings`: races, and branches that only some threads
of a program take. What Triton compiles parts threads nowhere on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from tests.kernels.triton.ptx.faults import HangError, PtxError, UnsupportedError
from tests.kernels.triton.ptx.instructions import SIMPLE, Copies
from tests.kernels.triton.ptx.memory import Clock, Memory, Region, SharedMemory
from tests.kernels.triton.ptx.operands import DTYPES, Effect, Mask, Registers, Site
from tests.kernels.triton.ptx.parser import Instruction, Kernel
from tests.kernels.triton.ptx.warps import COLLECTIVE, Products

# It takes the mask, which threads these are, and the index of the instruction. It returns the index
# of the instruction with which they go on, None where each has its own.
Control = Callable[[Mask, np.ndarray, int], int | None]

FAR = 1 << 40
RUNNING, EXITED, AT_BARRIER, AT_WARP = range(4)


class Machine:
    """What runs a kernel; a launch gives a program `shared` bytes.

    Raises:
        UnsupportedError: an instruction that the interpreter does not know.

    """

    def __init__(self, kernel: Kernel, shared: int, max_steps: int = 50_000_000) -> None:
        self.kernel, self.max_steps = kernel, max_steps
        self.threads, self.warps = kernel.threads, kernel.threads // 32
        # The bytes, and those of the narrowest access.
        widths = [
            DTYPES[instruction.parts[-1]].itemsize
            for instruction in kernel.instructions
            if instruction.parts[0] in ("ld", "st") and "shared" in instruction.parts
        ]
        self.shared = -(-max(kernel.shared_size, shared, 8) // 8) * 8, min([4, *widths])
        self.registers = Registers(kernel, self.threads)
        self.parameters: dict[str, bytes] = {}
        self.lane = np.arange(self.threads)
        self.warp = self.lane // 32
        self.memory = self._memory([])
        self.counters = np.zeros(self.threads, np.int64)
        self.status = np.zeros(self.threads, np.int8)
        self.current = 0  # the instruction that runs
        self.steps = 0
        self._clear()
        effects = [self._build(instruction) for instruction in kernel.instructions]
        self.simple = [simple for simple, _ in effects]
        self.control = [*(control for _, control in effects), self._exit]
        self.block_ends = np.zeros(len(self.control), np.int64).tolist()
        end = 0
        for index in reversed(range(len(self.control))):
            end = index if self.control[index] else end
            self.block_ends[index] = end

    def run(
        self, tensors: list[Region], grid: tuple[int, int, int], values: list[int | float]
    ) -> Memory:
        """Run all programs; the value of a parameter that is a pointer is an address.

        Raises:
            PtxError: a program did what ends the run.

        """
        self.memory = self._memory(tensors)
        self.steps = 0
        for (name, type), value in zip(self.kernel.parameters.items(), values, strict=True):
            dtype = DTYPES[type]
            bits = value if dtype.kind == "f" else int(value) % (1 << 8 * dtype.itemsize)
            unsigned = dtype if dtype.kind == "f" else f"u{dtype.itemsize}"
            self.parameters[name] = np.array(bits, unsigned).tobytes()
        for axis, count in zip("xyz", grid, strict=True):
            self.registers.rows[f"%nctaid.{axis}"][:] = count
        with np.errstate(all="ignore"):
            for index in range(math.prod(grid)):
                x, rest = index % grid[0], index // grid[0]
                self._run_program(index, (x, rest % grid[1], rest // grid[1]))
        return self.memory

    def _memory(self, tensors: list[Region]) -> Memory:
        clock = Clock(warp_epochs=np.zeros(self.threads, np.int32))
        return Memory(tensors, SharedMemory(*self.shared), clock, self._describe_current)

    def _clear(self) -> None:
        """Forget what a program leaves to no other."""
        self.registers.forget()
        self.memory.shared = SharedMemory(*self.shared)
        self.counters[:], self.status[:] = 0, RUNNING
        self.copies, self.products = Copies(self.threads), Products()

    def _run_program(self, index: int, place: tuple[int, int, int]) -> None:
        for axis, value in zip("xyz", place, strict=True):
            self.registers.rows[f"%ctaid.{axis}"][:] = value
        self._clear()
        self.memory.clock.program = index + 1
        self.memory.clock.epoch += 1
        try:
            while (self.status != EXITED).any():
                runs = self.status == RUNNING
                if not runs.any():
                    self._release()
                    continue
                counters = np.where(runs, self.counters, FAR)
                first = int(counters.min())
                group = counters == first
                limit = int(np.where(group, FAR, counters).min())
                self._advance(first, limit, None if group.all() else group, group)
        except PtxError as error:
            error.place = f" [program {place}; {self._describe_current()}]"
            raise

    def _advance(self, index: int, limit: int, mask: Mask, group: np.ndarray) -> None:
        """Let a group go on until others are there, or until it parts or waits."""
        while index < limit:
            end = min(self.block_ends[index], limit)
            self.steps += end - index + 1
            if self.steps > self.max_steps:
                raise HangError(f"no end after {self.max_steps} steps")
            for place in range(index, end):
                self.current = place
                self.simple[place](mask)
            index = end
            if index < limit:
                self.current = index
                successor = self.control[index](mask, group, index)
                if successor is None:
                    return
                index = successor
        self.counters[group] = index

    def _describe_current(self) -> str:
        return self._describe(self.current)

    def _describe(self, index: int) -> str:
        instructions = self.kernel.instructions
        return str(instructions[index]) if index < len(instructions) else "the end"

    def _build(self, instruction: Instruction) -> tuple[Effect | None, Control | None]:
        """Make the effect of an instruction, or what says where threads go on."""
        site = Site(instruction, self)
        try:
            for name in (instruction.parts[0], ".".join(instruction.parts[:2])):
                if name in CONTROL:
                    return None, self._guard_control(CONTROL[name](self, instruction), instruction)
                if name in COLLECTIVE:
                    effect = COLLECTIVE[name](site)
                    return None, self._guard_control(partial(self._meet, effect), instruction)
                if name in SIMPLE:
                    return self._guard(SIMPLE[name](site), instruction), None
        except (KeyError, ValueError, TypeError, AttributeError, StopIteration) as error:
            raise UnsupportedError(f"{instruction}: {error!r}") from error
        raise UnsupportedError(str(instruction))

    def _guard(self, effect: Effect, instruction: Instruction) -> Effect:
        if instruction.guard is None:
            return effect
        guard, is_negated = self.registers.rows[instruction.guard], instruction.is_negated

        def run(mask: Mask) -> None:
            branch = guard ^ is_negated
            if mask is not None:
                branch &= mask
            if branch.any():
                effect(branch)

        return run

    def _guard_control(self, control: Control, instruction: Instruction) -> Control:
        if instruction.guard is None:
            return control
        guard, is_negated = self.registers.rows[instruction.guard], instruction.is_negated

        def run(mask: Mask, group: np.ndarray, index: int) -> int | None:
            branch = (guard ^ is_negated) & group
            if not branch.any():
                return index + 1
            rest = group & ~branch
            if not rest.any():
                return control(mask, group, index)
            share = f"{branch.sum()} of {group.sum()}"
            self.memory.findings[f"threads part, {share} take the branch: {instruction}"] += 1
            self.counters[rest] = index + 1
            successor = control(branch, branch, index)
            if successor is not None:
                self.counters[branch] = successor
            return None

        return run

    def _branch(self, instruction: Instruction) -> Control:
        target = self.kernel.labels[instruction.operands[0]]
        return lambda mask, group, index: target

    def _return(self, instruction: Instruction) -> Control:
        return self._exit

    def _exit(self, mask: Mask, group: np.ndarray, index: int) -> None:
        self.status[group] = EXITED

    def _barrier(self, instruction: Instruction) -> Control:
        """Let all threads of a program wait for each other."""
        if instruction.operands != ["0"]:
            raise UnsupportedError(str(instruction))

        def wait(mask: Mask, group: np.ndarray, index: int) -> int | None:
            if mask is None:
                self.memory.clock.epoch += 1
                return index + 1
            self.status[group], self.counters[group] = AT_BARRIER, index
            return None

        return wait

    def _release(self) -> None:
        """Open the barrier at which all threads wait; else the kernel hangs."""
        alive = self.status != EXITED
        places = np.unique(self.counters[alive])
        if len(places) > 1 or (self.status[alive] != AT_BARRIER).any():
            self.current = int(places[0])
            raise HangError("all threads wait:" + self._waiting(alive))
        self.memory.clock.epoch += 1
        self.status[alive] = RUNNING
        self.counters[alive] += 1

    def _waiting(self, alive: np.ndarray) -> str:
        """Say which lanes wait where."""
        text = ""
        for warp in range(self.warps):
            for index in np.unique(self.counters[alive & (self.warp == warp)]).tolist():
                which = alive & (self.warp == warp) & (self.counters == index)
                lanes = _ranges(np.flatnonzero(which) % 32)
                text += f"\n    warp {warp}, lanes {lanes}: {self._describe(index)}"
        return text

    def _meet(self, effect: Effect, mask: Mask, group: np.ndarray, index: int) -> int | None:
        """Run an instruction of whole warps where all their lanes have come."""
        if mask is None:
            effect(None)
            return index + 1
        arrivals = group | (self.status == AT_WARP) & (self.counters == index)
        whole_warps = arrivals.reshape(self.warps, 32).all(axis=1).repeat(32)
        if whole_warps.any():
            effect(whole_warps)
        rest = arrivals & ~whole_warps
        if not rest.any() and (whole_warps == group).all():
            return index + 1
        self.status[whole_warps], self.counters[whole_warps] = RUNNING, index + 1
        self.status[rest], self.counters[rest] = AT_WARP, index
        return None


CONTROL = {"bra": Machine._branch, "ret": Machine._return, "bar.sync": Machine._barrier}


def _ranges(lanes: np.ndarray) -> str:
    """Write lane numbers as `0-3, 7`."""
    starts = np.flatnonzero(np.diff(lanes, prepend=-2) > 1)
    spans = [(span[0], span[-1]) for span in np.split(lanes, starts[1:])]
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
