"""Instructions of threads by themselves: arithmetic, moves, memory, copies into shared memory.

Each function makes the effect of an instruction; those that know a name are in `SIMPLE`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tests.kernels.triton.ptx import arithmetic
from tests.kernels.triton.ptx.faults import AccessError, UnsupportedError
from tests.kernels.triton.ptx.operands import DTYPES, FLOATS, Effect, Mask, Site

Operation = Callable[..., np.ndarray]

OPERATIONS: dict[str, Operation] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "neg": np.negative, "not": np.invert,
    "prmt": arithmetic.permute, "popc": np.bitwise_count,
}  # fmt: skip
FLOAT_OPERATIONS: dict[str, Operation] = {
    "div": np.divide, "fma": arithmetic.fma, "ex2": np.exp2,
    "min": arithmetic.lesser, "max": arithmetic.greater,
}  # fmt: skip
INTEGER_OPERATIONS: dict[str, Operation] = {
    "abs": np.abs, "div": arithmetic.divide, "min": np.minimum, "max": np.maximum,
}  # fmt: skip
COMPARISONS: dict[str, Operation] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "neu": np.not_equal, "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "ltu": lambda a, b: ~(a >= b),
}  # fmt: skip
ATOMICS: dict[str, Callable[[Any, Any], Any]] = {"add": operator.add, "max": max}
MODIFIERS = {"rn", "rzi", "ftz", "full", "approx", "lo"}


def _wrapped(operation: Operation, type: str, *, flushes: bool = False) -> Operation:
    """Return an operation that takes bfloat16 as float32, or subnormal numbers as zeros."""
    if type == "bf16":
        return lambda *values: operation(*map(arithmetic.from_bf16, values))
    if flushes:
        return lambda *values: operation(*map(arithmetic.flush, values))
    return operation


def _rounded(values: np.ndarray, type: str) -> np.ndarray:
    return arithmetic.to_bf16(values) if type == "bf16" else values.astype(DTYPES[type])


def _check_modifiers(site: Site, known: set[str]) -> None:
    if not known.issuperset(site.instruction.parts[1:-1]):
        raise UnsupportedError(str(site.instruction))


def _compute(site: Site) -> Effect:
    name, type = site.instruction.parts[0], site.type
    if {"wide", "hi"} & set(site.instruction.parts) or name == "mad":
        return _multiply(site)
    _check_modifiers(site, MODIFIERS)
    operations = FLOAT_OPERATIONS if type in FLOATS else INTEGER_OPERATIONS
    operation, flushes = OPERATIONS.get(name) or operations[name], "ftz" in site.instruction.parts
    operation = _wrapped(operation, type, flushes=flushes)
    put, sources = site.write(), [site.read(operand) for operand in site.sources]
    if flushes:
        return lambda mask: put(arithmetic.flush(operation(*sources)), mask)
    if type == "bf16":
        return lambda mask: put(arithmetic.to_bf16(operation(*sources)), mask)
    return lambda mask: put(operation(*sources), mask)


def _multiply(site: Site) -> Effect:
    """Multiply integers, and add another for `mad`."""
    parts, type = site.instruction.parts, site.type
    _check_modifiers(site, {"lo", "hi", "wide"})
    a, b = (site.read(operand) for operand in site.sources[:2])
    result_type = f"{type[0]}{2 * int(type[1:])}" if "wide" in parts else type
    dtype, put = DTYPES[result_type], site.write(result_type)
    addend = site.read(site.sources[2], result_type) if parts[0] == "mad" else None

    def multiply(mask: Mask) -> None:
        if "hi" in parts:
            product = arithmetic.multiply_high(a, b)
        else:
            product = a.astype(dtype, copy=False) * b.astype(dtype, copy=False)
        put(product if addend is None else product + addend, mask)

    return multiply


def _shift(operation: Operation, known_operation: Operation, site: Site) -> Effect:
    type, put = site.type.replace("b", "u"), site.write()
    a, amounts = site.read(site.sources[0], type), site.read(site.sources[1], "u32")
    if site.sources[1].isdecimal() and int(amounts[0]) < 8 * a.itemsize:
        operation, amounts = known_operation, amounts.astype(a.dtype)
    return lambda mask: put(operation(a, amounts), mask)


def _extract(site: Site) -> Effect:
    """Take so many bits from a place on; both are constants."""
    a, put = site.read(site.sources[0]), site.write()
    place, count, bits = int(site.sources[1]), int(site.sources[2]), 8 * a.itemsize
    up, down = a.dtype.type(bits - place - count), a.dtype.type(bits - count)
    return lambda mask: put((a << up) >> down, mask)


def _compare(site: Site) -> Effect:
    """Compare numbers, or the lower halves of words and then the upper ones."""
    (name,), type = site.instruction.parts[1:-1], site.type.removesuffix("x2")
    compare, target = _wrapped(COMPARISONS[name], type), site.instruction.operands[0]
    puts = [site.machine.registers.write(part.strip(), "pred") for part in target.split("|")]
    if type == site.type:
        (put,), (a, b) = puts, (site.read(operand) for operand in site.sources)
        return lambda mask: put(compare(a, b), mask)
    words = [site.read(operand, "b32") for operand in site.sources]
    a, b = (word.view(DTYPES[type]).reshape(-1, 2) for word in words)

    def compare_halves(mask: Mask) -> None:
        for half, put in enumerate(puts):
            put(compare(a[:, half].copy(), b[:, half].copy()), mask)

    return compare_halves


def _select(site: Site) -> Effect:
    a, b = (site.read(operand) for operand in site.sources[:2])
    which, put = site.read(site.sources[2], "pred"), site.write()
    return lambda mask: put(np.where(which, a, b), mask)


def _move(site: Site) -> Effect:
    """Move a register, or its parts from or into several."""
    target, source = site.instruction.operands
    registers, bits = site.machine.registers, site.type.lstrip("busf")
    if isinstance(target, list):
        type = f"b{int(bits) // len(target)}"
        parts = site.read(source).view(DTYPES[type])
        puts = [registers.write(operand, type) for operand in target]

        def unpack(mask: Mask) -> None:
            values = parts.copy()
            for place, put in enumerate(puts):
                put(values[place :: len(puts)], mask)

        return unpack
    put = site.write()
    if isinstance(source, list):
        sources = [site.read(operand, f"b{int(bits) // len(source)}") for operand in source]
        return lambda mask: put(np.stack(sources, axis=1).view(f"u{int(bits) // 8}")[:, 0], mask)
    a = site.read(source)
    return lambda mask: put(a, mask)


def _convert(site: Site) -> Effect:
    target_type, source_type = site.instruction.parts[-2:]
    _check_modifiers(site, {"rn", "rzi", target_type})
    sources = [site.read(operand, source_type) for operand in site.sources]
    if target_type in ("bf16x2", "f16x2"):  # Of which the first becomes the upper half.
        part_type, put = target_type.removesuffix("x2"), site.write("b32")

        def pack(mask: Mask) -> None:
            halves = np.stack([_rounded(source, part_type) for source in reversed(sources)], axis=1)
            put(halves.view(np.uint32)[:, 0], mask)

        return pack
    (source,), put = sources, site.write(target_type)
    if source_type == "bf16":
        return lambda mask: put(_rounded(arithmetic.from_bf16(source), target_type), mask)
    if source_type in FLOATS and target_type not in FLOATS:
        if target_type != "s32" or "rzi" not in site.instruction.parts:
            raise UnsupportedError(str(site.instruction))
        return lambda mask: put(arithmetic.truncate(source), mask)
    return lambda mask: put(_rounded(source, target_type), mask)


def _space(site: Site) -> str:
    return next(part for part in site.instruction.parts if part in ("param", "global", "shared"))


def _load(site: Site) -> Effect:
    machine, space, targets = site.machine, _space(site), site.instruction.operands[0]
    targets, address = targets if isinstance(targets, list) else [targets], site.sources[0]
    puts = [machine.registers.write(operand, site.type) for operand in targets]
    dtype = DTYPES[site.type]

    def load_parameter(mask: Mask) -> None:
        raw = machine.parameters[address.base][address.offset :]
        for place, put in enumerate(puts):
            value = np.frombuffer(raw, dtype, count=1, offset=place * dtype.itemsize)
            put(np.broadcast_to(value, machine.threads), mask)

    if space == "param":
        return load_parameter
    locate = machine.registers.address(address)
    values = np.zeros(machine.threads, dtype)

    def load(mask: Mask) -> None:
        lanes = site.lanes(mask)
        words = machine.memory.load(space, locate(lanes), lanes, dtype.itemsize, len(puts))
        for put, loaded in zip(puts, words, strict=True):
            values[lanes] = loaded.view(dtype)
            put(values, mask)

    return load


def _store(site: Site) -> Effect:
    machine, space, sources = site.machine, _space(site), site.sources[0]
    sources = sources if isinstance(sources, list) else [sources]
    type = f"b{8 * DTYPES[site.type].itemsize}"
    words = [site.read(operand, type) for operand in sources]
    locate = machine.registers.address(site.instruction.operands[0])

    def store(mask: Mask) -> None:
        lanes = site.lanes(mask)
        machine.memory.store(space, locate(lanes), lanes, [values[lanes] for values in words])

    return store


def _update(site: Site) -> Effect:
    """Update global memory atomically."""
    _, space, *_, name, _ = site.instruction.parts
    if space != "global":
        raise UnsupportedError(str(site.instruction))
    machine, operation, put = site.machine, ATOMICS[name], site.write()
    locate, values = machine.registers.address(site.sources[0]), site.read(site.sources[1])
    results = np.zeros_like(values)

    def update(mask: Mask) -> None:
        lanes = site.lanes(mask)
        results[lanes] = machine.memory.update(locate(lanes), lanes, operation, values[lanes])
        put(results, mask)

    return update


@dataclass
class Copy:
    """A copy of lanes into shared memory: `amounts` bytes of `size`, and zeros behind them."""

    lanes: np.ndarray
    groups: np.ndarray
    targets: np.ndarray
    sources: np.ndarray
    amounts: np.ndarray
    size: int

    def part(self, which: np.ndarray) -> Copy:
        fields = (self.lanes, self.groups, self.targets, self.sources, self.amounts)
        return Copy(*(values[which] for values in fields), self.size)

    def run(self, memory: Any) -> None:
        words = [np.zeros(len(self.lanes), np.uint32) for _ in range(self.size // 4)]
        for place, values in enumerate(words):
            which = np.flatnonzero(self.amounts > 4 * place)
            addresses = self.sources[which] + np.uint64(4 * place)
            values[which] = memory.load("global", addresses, self.lanes[which], 4, 1)[0]
        memory.store("shared", self.targets, self.lanes, words)


class Copies:
    """The copies of a program that are not done: each is when it is waited for."""

    def __init__(self, threads: int) -> None:
        self.pending: list[Copy] = []
        self.groups = np.zeros(threads, np.int64)

    def wait(self, lanes: np.ndarray, left: int, memory: Any) -> None:
        rest = []
        for copy in self.pending:
            is_due = np.isin(copy.lanes, lanes) & (copy.groups < self.groups[copy.lanes] - left)
            copy.part(is_due).run(memory)
            if not is_due.all():
                rest.append(copy.part(~is_due))
        self.pending = rest


def _copy(site: Site) -> Effect:
    machine, parts = site.machine, site.instruction.parts
    if "commit_group" in parts:

        def commit(mask: Mask) -> None:
            machine.copies.groups[site.lanes(mask)] += 1

        return commit
    if "wait_group" in parts:
        left = int(site.instruction.operands[0])
        return lambda mask: machine.copies.wait(site.lanes(mask), left, machine.memory)
    target, source, size, amount = site.instruction.operands
    targets, sources = machine.registers.address(target), machine.registers.address(source)
    size, amount = int(size, 0), site.read(amount, "u32")

    def begin(mask: Mask) -> None:
        lanes = site.lanes(mask)
        groups, amounts = machine.copies.groups[lanes], np.minimum(amount[lanes], size)
        copy = Copy(lanes, groups, targets(lanes), sources(lanes), amounts, size)
        addresses = np.where(amounts > 0, copy.sources, 0) | copy.targets
        if (addresses % np.uint64(size)).any() or (amounts % 4).any():
            raise AccessError(f"a copy of {size} bytes is not aligned")
        machine.copies.pending.append(copy)

    return begin


def _ignore(site: Site) -> Effect:
    return lambda mask: None


SIMPLE: dict[str, Callable[[Site], Effect]] = {
    **dict.fromkeys([*OPERATIONS, *FLOAT_OPERATIONS, *INTEGER_OPERATIONS, "mad"], _compute),
    "shl": partial(_shift, arithmetic.shift_left, np.left_shift),
    "shr": partial(_shift, arithmetic.shift_right, np.right_shift),
    "bfe": _extract,
    "setp": _compare,
    "selp": _select,
    "mov": _move,
    "cvt": _convert,
    "ld": _load,
    "st": _store,
    "atom": _update,
    "cp.async": _copy,
    "fence": _ignore,
}
