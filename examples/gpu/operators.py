"""What a machine has, and whether vLLM's compiled operators are right on its GPU.

    python -P examples/gpu/operators.py operators.json

A norm, and FlashAttention with heads of 64 and 128, are compared with torch: of a kit
(`make_kit.py`) these kernels are left, and whether the GPU takes them is told in seconds. Without a
GPU it is the norm alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import vllm
from torch.nn import functional
from vllm import _custom_ops as operators

from vllm_recycle.cli.bench.report import origin

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
LIMIT = 0.05  # three times the distance of neighbouring bfloat16 numbers around 3
BLOCKS, BLOCK_SIZE, HEADS, KV_HEADS = 7, 16, 8, 2
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def main(path: Path) -> None:
    torch.manual_seed(0)
    checks = {"norm": norm_error}
    if HAS_GPU:
        checks |= {f"heads of {size}": partial(attention_error, size) for size in (64, 128)}
    outcomes = {name: outcome(check) for name, check in checks.items()}
    path.write_text(json.dumps({**machine(), "operators": outcomes}, indent=1) + "\n")
    print(path.read_text())
    if not all(text.startswith("right") for text in outcomes.values()):
        sys.exit("an operator is wrong or fails")


def outcome(check: Callable[[], float]) -> str:
    try:
        error = check()
    except RuntimeError as failure:
        return f"fails: {failure}".partition("\n")[0]
    return f"{'right' if error <= LIMIT else 'wrong'}, off by {error:.2g}"


def machine() -> dict[str, object]:
    """Versions, device and driver."""
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "triton": version("triton")}
    driver = subprocess.run(DRIVER, capture_output=True, text=True, check=True) if HAS_GPU else None
    return {
        "device": torch.cuda.get_device_name() if HAS_GPU else "cpu",
        "driver": driver.stdout.split()[0] if driver else None,
        **origin(**versions),
    }


def norm_error() -> float:
    row = random(4, 4096)
    out, weight = torch.empty_like(row), torch.ones_like(row[0])
    operators.rms_norm(out, row, weight, 1e-5)
    return off_by(out, functional.rms_norm(row.float(), (4096,), eps=1e-5))


def attention_error(head_size: int) -> float:
    """Of a prompt whose keys and values lie in blocks."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported

    tokens = BLOCKS * BLOCK_SIZE
    query = random(tokens, HEADS, head_size)
    keys, values = (random(BLOCKS, BLOCK_SIZE, KV_HEADS, head_size) for _ in range(2))
    out = flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        max_seqlen_q=tokens,
        cu_seqlens_q=integers(0, tokens),
        max_seqlen_k=tokens,
        seqused_k=integers(tokens),
        causal=True,
        block_table=integers(*range(BLOCKS))[None],
        fa_version=3 if is_fa_version_supported(3) else 2,
    )
    dense = (x.float().transpose(0, 1) for x in (query, keys.flatten(0, 1), values.flatten(0, 1)))
    expected = functional.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)
    return off_by(out, expected.transpose(0, 1))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE, dtype=torch.int32)


def off_by(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found.float() - expected).abs().max().item()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
