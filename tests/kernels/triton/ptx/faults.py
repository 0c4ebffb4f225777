"""What ends a run of PTX in the interpreter."""

from __future__ import annotations


class PtxError(Exception):
    """Any of them; `place` says of which program and instruction."""

    place = ""

    def __str__(self) -> str:
        return f"{type(self).__name__}: {super().__str__()}{self.place}"


class HangError(PtxError):
    """Threads wait for others that never come, or a run takes more steps than it may."""


class AccessError(PtxError):
    """Memory of no tensor, memory that is not aligned, or shared memory that nobody wrote."""


class UnsupportedError(PtxError):
    """An instruction, or a form of one, that the interpreter does not know."""
