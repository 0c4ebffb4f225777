"""PTX as Triton writes it: a kernel's instructions, labels, registers and parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tests.kernels.triton.ptx.faults import UnsupportedError


@dataclass(slots=True)
class Instruction:
    """A statement of a kernel that does something.

    Attributes:
        parts: its name, which modifiers follow.
        operands: a register, number or label as in the text, an `Address`, or a list of these.
        guard: the predicate that says which threads execute it; None for all.
        is_negated: whether it says which do not.
        line: of the PTX.
        source: file, line and column of what it was compiled from.
        text: the statement.

    """

    parts: list[str]
    operands: list[Any]
    guard: str | None
    is_negated: bool
    line: int
    source: str
    text: str

    def __str__(self) -> str:
        return f"PTX line {self.line}: {self.text}   at {self.source}"


@dataclass(slots=True)
class Address:
    """A place so many bytes behind what a register or a variable in shared memory holds."""

    base: str
    offset: int


@dataclass(slots=True)
class Kernel:
    """A kernel as its `.entry` declares it.

    Attributes:
        labels: indices of the instructions behind them.
        registers: their types, by name.
        parameters: their types, by name, in order.
        shared: byte offsets of variables in shared memory.
        shared_size: bytes of those whose size is declared.
        threads: of a program.

    """

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    shared_size: int = 0
    threads: int = 0


_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_LABEL = re.compile(r"([$\w]+):(?!:)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]")


def parse(text: str) -> Kernel:
    """Read the only kernel of a text.

    Raises:
        UnsupportedError: a statement that is not understood.

    """
    heading, _, body = text.partition("\n{\n")
    kernel = Kernel()
    _read_heading(kernel, heading)
    first_line = heading.count("\n") + 3
    source, buffer, start = "", "", first_line
    for number, line in enumerate(body.splitlines(), first_line):
        code, _, comment = line.partition("//")
        code = code.strip()
        if code == "}" and not buffer:
            break
        if code.startswith(".loc"):
            source = comment.strip()
            continue
        start = start if buffer else number
        buffer = f"{buffer}\n{code}".lstrip()
        if label := _LABEL.match(buffer):
            kernel.labels[label[1]] = len(kernel.instructions)
            buffer = buffer[label.end() :].lstrip()
        *statements, buffer = buffer.split(";")
        for statement in statements:
            _read_statement(kernel, statement.strip(), start, source)
        buffer = buffer.lstrip()
    return kernel


def _read_heading(kernel: Kernel, heading: str) -> None:
    for align, name, size in _SHARED.findall(heading):
        kernel.shared[name] = -(-kernel.shared_size // int(align)) * int(align)
        kernel.shared_size = kernel.shared[name] + int(size or 0)
    entry = heading[heading.index(".entry") :]
    for type, name in re.findall(r"\.param\s+\.(\w+)\s.*?([\w$]+)(?=,|\s*\))", entry):
        kernel.parameters[name] = type
    kernel.threads = int(re.search(r"\.reqntid\s+(\d+)", entry)[1])


def _read_statement(kernel: Kernel, text: str, line: int, source: str) -> None:
    if registers := _REGISTERS.match(text):
        for name in registers[2].split(","):
            prefix, _, count = name.strip().rstrip(">").partition("<")
            names = [f"{prefix}{index}" for index in range(int(count))] if count else [prefix]
            kernel.registers.update(dict.fromkeys(names, registers[1]))
    elif not text.startswith(".pragma"):
        matched = _STATEMENT.fullmatch(text)
        if not matched:
            raise UnsupportedError(f"line {line}: {text!r}")
        negation, guard, name, operands = matched.groups()
        kernel.instructions.append(
            Instruction(
                parts=name.replace("shared::cta", "shared").split("."),
                operands=[_read_operand(operand) for operand in _split(operands)],
                guard=guard,
                is_negated=bool(negation),
                line=line,
                source=source,
                text=" ".join(text.split()),
            )
        )


def _split(text: str) -> list[str]:
    """Split a text at the commas outside of braces."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|[^,{])+", text)]


def _read_operand(text: str) -> Any:
    if text.startswith("{"):
        return [_read_operand(part) for part in _split(text[1:-1])]
    if not text.startswith("["):
        return text
    base, offset = "", 0
    for part in text[1:-1].replace("+", " ").split():
        if re.match(r"-?\d", part):
            offset += int(part, 0)
        else:
            base = part
    return Address(base, offset)
