"""vLLM's paged KV cache on CUDA: what all layers of a group have in common.

The cache of a layer is [blocks, kv_heads, block_size, 2 * head_size] with any strides but the last
(vLLM stores it by heads or by tokens); the last dimension holds a token's keys and then its
values. Slot s is the token s % block_size of block s // block_size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayers:
    """Layers of one shape and layout, on one device; made by `make`.

    Attributes:
        kv_caches: [blocks, kv_heads, block_size, 2 * head_size] each, no two the same memory.
        pointers: int64 [layers], on the device, the address of each.
        grain: bytes of the widest integer, at most 8, whose size divides every address and stride
            and a token's part in a head: a token can be moved in such integers.

    """

    kv_caches: tuple[torch.Tensor, ...]
    pointers: torch.Tensor
    grain: int

    @classmethod
    def make(cls, kv_caches: Sequence[torch.Tensor]) -> PagedLayers:
        """The distinct ones of these caches: layers may share one, and it is moved once.

        One or more, of one shape, layout, dtype and device.
        """
        first = kv_caches[0]
        assert first.ndim == 4, first.shape
        assert first.stride(-1) == 1, first.stride()
        for kv_cache in kv_caches:
            layouts = [(kv.shape, kv.stride(), kv.dtype, kv.device) for kv in (kv_cache, first)]
            assert layouts[0] == layouts[1], layouts
        distinct = {kv_cache.data_ptr(): kv_cache for kv_cache in kv_caches}
        pointers = torch.tensor(list(distinct), dtype=torch.int64, device=first.device)
        size = first.element_size()
        steps = [size * length for length in (*first.stride()[:3], first.shape[3])]
        return cls(tuple(distinct.values()), pointers, math.gcd(8, *distinct, *steps))
