"""Compile a kernel for a GPU that need not be there, and print what a start would say of it."""

from __future__ import annotations

import json

from tests.kernels.triton import fake_gpu
from tests.kernels.triton.compile_cases import cases
from vllm_recycle.kernels.triton.compile_times import describe_compiling

if __name__ == "__main__":
    fake_gpu.select(90, lambda *_: None)
    next(case for case in cases() if "walk" in case.name).launch()
    print(json.dumps(describe_compiling()))
