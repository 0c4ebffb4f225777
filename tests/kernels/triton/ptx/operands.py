"""Operands of instructions as NumPy arrays with an element a thread, and values put into them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.kernels.triton.ptx.faults import UnsupportedError
from tests.kernels.triton.ptx.memory import SHARED_START, UNWRITTEN
from tests.kernels.triton.ptx.parser import Address, Instruction, Kernel

Mask = np.ndarray | None  # the threads that take part; None for all
Effect = Callable[[Mask], None]
Put = Callable[[np.ndarray, Mask], None]

DTYPES = {
    **{f"{kind}{8 * size}": np.dtype(f"u{size}") for kind in "bu" for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    "f16": np.dtype("f2"),
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "bf16": np.dtype("u2"),  # its bits
    "pred": np.dtype(bool),
}
FLOATS = ("f16", "bf16", "f32", "f64")


class Registers:
    """The registers of a program's threads; each is a row of an array."""

    def __init__(self, kernel: Kernel, threads: int) -> None:
        self.shared, self.threads = kernel.shared, threads
        names: dict[str, list[str]] = {}
        for name, type in kernel.registers.items():
            names.setdefault(type, []).append(name)
        self.files = [
            np.zeros((len(group), threads), DTYPES[type]) for type, group in names.items()
        ]
        self.rows = {
            name: row
            for group, file in zip(names.values(), self.files, strict=True)
            for name, row in zip(group, file, strict=True)
        }
        self.rows["%tid.x"] = np.arange(threads, dtype=np.uint32)
        for axis in "xyz":
            self.rows[f"%ctaid.{axis}"] = np.zeros(threads, np.uint32)
            self.rows[f"%nctaid.{axis}"] = np.zeros(threads, np.uint32)

    def forget(self) -> None:
        """Fill all registers with what no program has computed."""
        for file in self.files:
            file.view(np.uint8)[:] = 1 if file.dtype == bool else UNWRITTEN

    def read(self, operand: str, type: str) -> np.ndarray:
        """Return what always holds the operand, [threads]; of a wider register its low bits.

        Raises:
            UnsupportedError: an operand that is not understood, or a narrower register.

        """
        dtype, row = DTYPES[type], self.rows.get(operand)
        if row is None:
            return self._constant(operand, dtype)
        if (row.dtype.kind == "b") != (dtype.kind == "b") or row.itemsize < dtype.itemsize:
            raise UnsupportedError(f"{operand} as {type}")
        return row.view(dtype)[:: row.itemsize // dtype.itemsize]

    def _constant(self, text: str, dtype: np.dtype) -> np.ndarray:
        if dtype.kind == "b":
            return np.full(self.threads, int(text, 0) != 0)
        if text in self.shared:
            bits = SHARED_START + self.shared[text]
        elif matched := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
            bits = int(matched[1], 16)
        elif re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            bits = int(text.rstrip("U"), 0)
        else:
            raise UnsupportedError(f"operand {text!r}")
        size = dtype.itemsize
        return np.full(self.threads, bits % (1 << 8 * size), f"u{size}").view(dtype)

    def write(self, operand: str, type: str) -> Put:
        """Return what puts values of a type into a register; it fills a wider one up."""
        if operand == "_":
            return lambda values, mask: None
        dtype, row = DTYPES[type], self.rows[operand]
        if row.dtype != bool:
            if row.itemsize > dtype.itemsize:
                dtype = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{row.itemsize}")
            row = row.view(dtype)

        def put(values: np.ndarray, mask: Mask) -> None:
            if mask is None:
                row[:] = values
            else:
                np.copyto(row, values, where=mask, casting="unsafe")

        return put

    def address(self, operand: Address) -> Callable[[np.ndarray], np.ndarray]:
        """Return what computes the addresses of some lanes, uint64 [lanes]."""
        if operand.base in self.shared:
            start = SHARED_START + self.shared[operand.base] + operand.offset
            return lambda lanes: np.full(len(lanes), start, np.uint64)
        row = self.rows[operand.base]
        offset = row.dtype.type(operand.offset % (1 << 8 * row.itemsize))
        return lambda lanes: (row[lanes] + offset).astype(np.uint64)


@dataclass
class Site:
    """An instruction of a `Machine`, and its operands."""

    instruction: Instruction
    machine: Any

    @property
    def type(self) -> str:
        return self.instruction.parts[-1]

    @property
    def sources(self) -> list[Any]:
        return self.instruction.operands[1:]

    def read(self, operand: str, type: str | None = None) -> np.ndarray:
        return self.machine.registers.read(operand, type or self.type)

    def write(self, type: str | None = None) -> Put:
        """Return what puts values into the first operand."""
        return self.machine.registers.write(self.instruction.operands[0], type or self.type)

    def lanes(self, mask: Mask) -> np.ndarray:
        """Return the threads that take part."""
        return self.machine.lane if mask is None else np.flatnonzero(mask)
