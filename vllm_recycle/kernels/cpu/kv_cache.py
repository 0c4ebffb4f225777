"""vLLM's paged KV cache on CPU: where a token's keys and values lie.

The cache of a layer is [blocks, kv_heads, block_size, 2 * head_size]. Within a block and head the
first half holds the keys and the second the values, in the order that the instruction set of
vLLM's kernel wants (t: token in the block, d: dimension, B: block size, D: head size):

    amx          K (t // 16) * 16 D + (d // 2) * 32 + (t % 16) * 2 + d % 2
                 V (d // 16) * 16 B + (t // 2) * 32 + (d % 16) * 2 + t % 2
    vec, vec16   K d * B + t
                 V t * D + d

(vllm.v1.attention.backends.cpu_attn; each order was read off the kernel's own writes, which the
tests repeat.)
"""

from __future__ import annotations

from functools import lru_cache

import torch

ISAS = ("amx", "vec", "vec16")


def slot_elements(slots: torch.Tensor, *, shape: torch.Size, isa: str) -> torch.Tensor:
    """Where the keys and values of each slot lie in a flattened layer.

    Args:
        slots: int64 [n], block * block_size + token in the block.
        shape: of the layer's cache, [blocks, kv_heads, block_size, 2 * head_size].
        isa: one of `ISAS`.

    Returns:
        int64 [n, 2 * kv_heads * head_size].

    """
    _, heads, block_size, width = shape
    block, token = slots // block_size, slots % block_size
    offsets = _offsets_in_block(heads, block_size, width // 2, isa)
    return offsets[token] + (block * (heads * block_size * width))[:, None]


@lru_cache
def _offsets_in_block(heads: int, block_size: int, dim: int, isa: str) -> torch.Tensor:
    """int64 [block_size, 2 * heads * dim], element offsets of each token within a block."""
    t = torch.arange(block_size)[:, None]
    d = torch.arange(dim)[None]
    if isa == "amx":
        keys = (t // 16) * 16 * dim + (d // 2) * 32 + (t % 16) * 2 + d % 2
        values = (d // 16) * 16 * block_size + (t // 2) * 32 + (d % 16) * 2 + t % 2
    elif isa in ISAS:
        keys = d * block_size + t
        values = t * dim + d
    else:
        raise ValueError(f"KV cache layout: got isa {isa!r}, expected one of {ISAS}")
    one_head = torch.cat((keys, values + block_size * dim), dim=1)
    head_starts = torch.arange(heads) * (2 * block_size * dim)
    return (one_head[:, None] + head_starts[None, :, None]).flatten(1)
