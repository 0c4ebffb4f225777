"""vLLM's paged KV cache on CPU: where a token's keys and values lie, and moving them.

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

from collections.abc import Sequence
from functools import lru_cache

import torch

ISAS = ("amx", "vec", "vec16")


def gather_keys_values(
    kv_cache: torch.Tensor, block_table: torch.Tensor, *, isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the blocks of each request out into dense keys and values.

    Args:
        kv_cache: [blocks, kv_heads, block_size, 2 * head_size].
        block_table: integer [batch, n], the blocks of each request in order.
        isa: one of `ISAS`.

    Returns:
        Keys and values, each [batch, kv_heads, n * block_size, head_size].

    """
    batch, num_blocks = block_table.shape
    _, heads, block_size, width = kv_cache.shape
    dim = width // 2
    blocks = kv_cache.index_select(0, block_table.flatten())
    halves = blocks.view(batch, num_blocks, heads, 2, block_size * dim)
    keys, values = halves[:, :, :, 0], halves[:, :, :, 1]
    if isa == "amx":
        # Two neighbours of two bytes move as one of four where the order allows.
        tiles = keys.view(torch.int32).view(
            batch, num_blocks, heads, block_size // 16, dim // 2, 16
        )
        keys = tiles.permute(0, 2, 1, 3, 5, 4).contiguous().view(kv_cache.dtype)
        pairs = values.view(batch, num_blocks, heads, dim // 16, block_size // 2, 16, 2)
        values = pairs.permute(0, 2, 1, 4, 6, 3, 5)
    else:
        keys = keys.view(batch, num_blocks, heads, dim, block_size).permute(0, 2, 1, 4, 3)
        values = values.view(batch, num_blocks, heads, block_size, dim).transpose(1, 2)
    shape = (batch, heads, num_blocks * block_size, dim)
    return keys.reshape(shape), values.reshape(shape)


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


def move_slots(
    kv_caches: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor, *, isa: str
) -> None:
    """Copy the keys and values of the source slots to the target slots, in every layer.

    All sources are read before a target is written, so the two may overlap. This is the reference;
    `cache_calls.move_slots` moves those of all layers in one call.

    Args:
        kv_caches: layers of one shape, contiguous; layers that share memory given once.
        source: int64 [n].
        target: int64 [n], without repetitions.
        isa: one of `ISAS`.

    """
    shape = kv_caches[0].shape
    read = slot_elements(source, shape=shape, isa=isa).flatten()
    write = slot_elements(target, shape=shape, isa=isa).flatten()
    for kv_cache in kv_caches:
        flat = kv_cache.view(-1)
        flat.index_copy_(0, write, flat.index_select(0, read))


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
