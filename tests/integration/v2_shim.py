"""Lets vLLM's Model Runner V2 start on a CPU, under the Triton interpreter; for tests.

V2 asks for Triton, and Triton has no CPU backend to compile its kernels with. Its interpreter runs
them, slowly, once vLLM is told that there is a backend: no code of vLLM is changed. vLLM's kernels
for top-k, top-p and n-grams do not run in it.

Remove when a Triton with a CPU backend is on the package index.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace


def install() -> None:
    """Prepare this process; to be called before vllm is imported."""
    assert "vllm" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    os.environ["VLLM_RECYCLE_ALLOW_V2"] = "1"
    # The engine in this process: in a child what follows would be missing.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import triton.backends

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
