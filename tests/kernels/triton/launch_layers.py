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

launches: list[tuple] = []
looks: list[JITFunction] = []


def launched(kernel: Any, *given: Any) -> None:
    # The grid and the stream; what is the kernel's or a hook's; and the arguments.
    launches.append((kernel.name, *given[:4], *given[9:]))


def seen(step: Step) -> dict[str, Any]:
    """What its launches are given, of tensors of the step where they lie, and Triton's looks."""
    launches.clear()
    looks.clear()
    step.attend(num_splits=2)
    of_rows = (getattr(step.rows, each.name) for each in fields(step.rows))
    tensors = [one for one in (step.query, step.kv_cache, *of_rows) if torch.is_tensor(one)]
    known = {tensor.data_ptr() for tensor in tensors}

    def shown(value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return str(value)
        return f"{value.dtype} {tuple(value.shape)} {known & {value.data_ptr()}}"

    return {"launches": [[*map(shown, launch)] for launch in launches], "looks": len(looks)}


if __name__ == "__main__":
    run = JITFunction.run
    JITFunction.run = lambda *args, **given: looks.append(args[0]) or run(*args, **given)
    fake_gpu.select(90, launched)
    shape = Shape(kv_heads=1, head_size=16)
    step, other = (Step.make(PAPER, (Request(5, 150),), shape) for _ in range(2))
    layer = replace(other, rows=step.rows)
    steps = {"first": step, "again": layer, "anew": replace(layer, rows=replace(step.rows))}
    print(json.dumps({name: seen(step) for name, step in steps.items()}))
