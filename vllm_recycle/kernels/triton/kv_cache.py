"""Moving an accepted path in the KV cache, in all layers in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_recycle.kernels.triton.paged_layers import PagedLayers

# A program moves so many elements of so many tokens at a time.
ELEMENTS = 256
TOKENS = 8


def compact_path(
    layers: PagedLayers,
    slot_mapping: torch.Tensor,
    logits_indices: torch.Tensor,
    cu_num_logits: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """Move the KV of each accepted path to the first slots of its request's rows.

    Args:
        layers: of one KV cache group, changed in place.
        slot_mapping: int64 [tokens], block * block_size + token in the block.
        logits_indices: int64 [logit rows], where each logit row is among the tokens.
        cu_num_logits: integer [batch + 1], where the logit rows of each request begin, and the end.
        path: int64 [batch, path], the accepted rows of each tree from the root (row 0) down,
            ascending, padded with -1.

    """
    # Keys and values are moved as integers, eight bytes a lane where the layout allows.
    integer = f"int{8 * layers.grain}"
    kv_cache = layers.kv_caches[0].view(getattr(torch, integer))
    _, heads, block_size, width = kv_cache.shape
    batch, length = path.shape
    programs = (batch, len(layers.kv_caches), triton.cdiv(heads * width, ELEMENTS))
    _compact_path_kernel[programs](
        layers.pointers,
        slot_mapping.contiguous(),
        logits_indices.contiguous(),
        cu_num_logits.contiguous(),
        path.contiguous(),
        *kv_cache.stride()[:3],
        PATH=length,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        WIDTH=width,
        INTEGER=getattr(tl, integer),
        ELEMENTS=ELEMENTS,
        TOKENS=TOKENS,
        num_warps=4,
    )


@triton.jit
def _compact_path_kernel(
    pointers: tl.tensor,
    slot_mapping: tl.tensor,
    logits_indices: tl.tensor,
    cu_num_logits: tl.tensor,
    path: tl.tensor,
    block_stride: int,
    head_stride: int,
    token_stride: int,
    PATH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    INTEGER: tl.constexpr,
    ELEMENTS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """A program for a request, a layer and a part of a token's elements."""
    index = tl.program_id(0).to(tl.int64)
    element = tl.program_id(2) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = (element < HEADS * WIDTH)[None, :]
    kv_cache = tl.load(pointers + tl.program_id(1)).to(tl.pointer_type(INTEGER))
    elements = kv_cache + (element // WIDTH).to(tl.int64) * head_stride + element % WIDTH
    rows = logits_indices + tl.load(cu_num_logits + index)
    for start in range(0, PATH, TOKENS):
        place = start + tl.arange(0, TOKENS)
        row = tl.load(path + index * PATH + place, mask=place < PATH, other=-1)
        moves = row > place
        if tl.max(moves.to(tl.int32), axis=0) > 0:
            source = tl.load(slot_mapping + tl.load(rows + row, mask=moves, other=0), mask=moves)
            target = tl.load(slot_mapping + tl.load(rows + place, mask=moves, other=0), mask=moves)
            source = source // BLOCK_SIZE * block_stride + source % BLOCK_SIZE * token_stride
            target = target // BLOCK_SIZE * block_stride + target % BLOCK_SIZE * token_stride
            mask = moves[:, None] & inside
            values = tl.load(elements[None, :] + source[:, None], mask=mask)
            # A place may be another's source, never a later one's: rows ascend, and none lies
            # before its place. So it is enough that all of these are read before one is written.
            tl.debug_barrier()
            tl.store(elements[None, :] + target[:, None], values, mask=mask)
