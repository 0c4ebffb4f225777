"""The layouts of vLLM's CPU cache for the tests, and vLLM's own op that writes them."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import pytest
import torch
from vllm import _custom_ops as ops

from vllm_recycle.kernels.cpu.kv_cache import slot_elements

NUM_BLOCKS = 6
# What a slot holds that was not written: finite, as vLLM's are, and far from any key or value.
STALE = 1e4


@dataclass(frozen=True)
class Layout:
    """How a layer's keys and values are stored, and which heads they are of."""

    isa: str
    dtype: torch.dtype
    head_size: int
    block_size: int
    heads: int = 6  # three queries a key: grouped-query attention
    kv_heads: int = 2

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads}of{self.kv_heads}"
        return f"{self.isa}-{dtype}-{heads}-head{self.head_size}-block{self.block_size}"

    @property
    def num_slots(self) -> int:
        return NUM_BLOCKS * self.block_size

    def empty_cache(self, num_blocks: int = NUM_BLOCKS) -> torch.Tensor:
        shape = (num_blocks, self.kv_heads, self.block_size, 2 * self.head_size)
        return torch.full(shape, STALE, dtype=self.dtype)

    def random_keys_values(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = torch.randn(2, num_tokens, self.kv_heads, self.head_size).to(self.dtype)
        return keys, values


LAYOUTS = [
    Layout("amx", torch.bfloat16, 64, 32),
    Layout("amx", torch.bfloat16, 96, 64),
    Layout("vec", torch.bfloat16, 64, 32),
    Layout("vec", torch.float32, 32, 64),
    Layout("vec16", torch.float32, 80, 32),
    Layout("vec16", torch.bfloat16, 80, 48),
]

HAS_AMX = torch.cpu._is_amx_tile_supported()
if HAS_AMX:
    torch.cpu._init_amx()


def skip_reason(isa: str) -> str:
    if platform.machine() != "x86_64":
        return "the layouts are those of x86"
    return "this CPU has no AMX" if isa == "amx" and not HAS_AMX else ""


def marks_of(isa: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.skip(reason=skip_reason(isa))] if skip_reason(isa) else []


every_layout = pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=marks_of(one.isa)) for one in LAYOUTS], ids=str
)


def halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer, as vLLM's backend passes them to its ops."""
    num_blocks, num_heads, block_size, _ = kv_cache.shape
    return kv_cache.view(num_blocks, num_heads, 2 * block_size, -1).chunk(2, dim=2)


def write(
    kv_cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, isa: str
) -> None:
    ops.cpu_attn_reshape_and_cache(keys, values, *halves(kv_cache), slots, isa)


def gather_keys_values(
    kv_cache: torch.Tensor, blocks: list[int], isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the tokens of some blocks, each [tokens, kv_heads, head_size]."""
    _, heads, block_size, _ = kv_cache.shape
    slots = (torch.tensor(blocks)[:, None] * block_size + torch.arange(block_size)).flatten()
    elements = slot_elements(slots, shape=kv_cache.shape, isa=isa)
    keys, values = kv_cache.view(-1)[elements].view(len(slots), heads, 2, -1).unbind(2)
    return keys, values
