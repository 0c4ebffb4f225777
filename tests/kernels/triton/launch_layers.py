"""Attend in two layers of a step without a GPU, and print what a driver would get, as JSON.

To be run without TRITON_INTERPRET, in which no launch is compiled. Kernels are compiled for sm_90,
and their arguments kept in the place of a launch. The output is, of the second layer's launches,
what they are given where they take what the first layer's have found (`again`), and where Triton
looks at every argument itself (`anew`); and how often it looked, in both.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import torch
from triton.runtime.jit import JITFunction  # noqa: TID253 - a script of its own

from tests.kernels.triton import fake_gpu
from tests.kernels.triton.attention_steps import PAPER, Request, Shape, Step


class Seen:
    """What was launched, and how often Triton looked at arguments."""

    def __init__(self) -> None:
        self.launches: list[list[str]] = []
        self.names: dict[int, str] = {}  # of tensors, by where they are
        self.num_looks = 0
        run = JITFunction.run

        def looked(kernel: Any, *args: Any, **given: Any) -> Any:
            self.num_looks += 1
            return run(kernel, *args, **given)

        JITFunction.run = looked
        fake_gpu.select(90, self._launched)

    def _launched(self, kernel: Any, *given: Any) -> None:
        # The grid and the stream; what is the kernel's or a hook's; and the arguments.
        self.launches.append([kernel.name, *map(self._shown, (*given[:4], *given[9:]))])

    def _shown(self, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        return f"{value.dtype} {tuple(value.shape)}, {self.names.get(value.data_ptr(), 'new')}"

    def take(self, step: Step) -> dict[str, Any]:
        self.launches, self.num_looks = [], 0
        of_rows = {each.name: getattr(step.rows, each.name) for each in fields(step.rows)}
        tensors = {"query": step.query, "kv_cache": step.kv_cache, **of_rows}
        self.names = {
            value.data_ptr(): f"{name} {value.data_ptr()}"
            for name, value in tensors.items()
            if isinstance(value, torch.Tensor)
        }
        step.attend(num_splits=2)
        return {"launches": self.launches, "looks": self.num_looks}


def main() -> None:
    seen = Seen()
    shape = Shape(kv_heads=1, head_size=16)
    step, other = (Step.make(PAPER, (Request(5, 150),), shape) for _ in range(2))
    layer = replace(other, rows=step.rows)
    first, again = seen.take(step), seen.take(layer)
    anew = seen.take(replace(layer, rows=replace(step.rows)))
    print(json.dumps({"first": first, "again": again, "anew": anew}))


if __name__ == "__main__":
    main()
