"""Tree attention over vLLM's paged KV cache: what the kernel is given, and its torch reference.

A request with a tree has R rows, the root and then a prefix of a template's nodes; they are its
last R tokens, and the C tokens before them are its context. The keys and values of all C + R
tokens lie in the cache already, in linear slots: row r is token C + r. A row attends to the whole
context, to its ancestors and to itself.

Where the rows have no slots, theirs are those of the forward itself (`own`), and the cache has the
context's alone. A layer that shares another layer's cache has none of its own.

`tree_attention` is plain and slow, and defines what `triton.tree_attention` does on
a GPU. It is not for CPU steps either: vLLM's CPU cache has another layout (`cpu.tree_attention`).

Names of dimensions, beside those of `vllm_recycle.core.tree`:

    tokens  rows of the step, of all requests     heads     of the queries, a multiple of kv_heads
    words   32 rows each, to hold all rows        n         blocks that a request may have
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_recycle.core.tree import TreeTemplate

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class PagedTreeRows:
    """The tree rows of a step; what all layers of a step share.

    Attributes:
        ancestor_bits: int32 [rows, words], see the function of that name; contiguous.
        query_start_loc: int32 [batch + 1], the flat row of each request's root, and the end. A
            request without rows is passed over.
        seq_lens: int32 [batch], tokens of each request with rows and padding; any without rows.
        block_table: int32 [batch, n], the blocks of each request; only those that hold its tokens
            are read, and with `own` those of its context.
        max_rows: at least the rows of any request, at most those of the template. On the host,
            because grids are made from it.
        num_padding: int32 [batch], how many of a request's first rows are none; None where all are
            rows. They are neither seen nor written, and its context ends at the row behind them.
            They may only be what a template begins with as a chain, above all other rows.

    """

    ancestor_bits: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_rows: int
    num_padding: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        return self.seq_lens.shape[0]


def ancestor_bits(tree: TreeTemplate) -> torch.Tensor:
    """The ancestor mask in bits: column c of a row is bit c % 32 of its word c // 32.

    Returns:
        int32 [rows, words] on the CPU, a constant of the template: move it to the device once.

    """
    rows = len(tree.ancestor_mask)
    words = -(-rows // WORD_BITS)
    mask = torch.zeros(rows, words * WORD_BITS, dtype=torch.int32)
    mask[:, :rows] = tree.ancestor_mask
    bit = torch.arange(WORD_BITS, dtype=torch.int32)
    return (mask.view(rows, words, WORD_BITS) << bit).sum(dim=2, dtype=torch.int32)


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    *,
    rows: PagedTreeRows,
    scale: float,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Attend from every tree row to its context and its ancestors; their KV is written already.

    Args:
        query: floating [tokens, heads, head_size], of any row and head stride.
        kv_cache: [blocks, kv_heads, block_size, 2 * head_size], keys before values, of any strides
            but the last.
        output: [tokens, heads, head_size], written at the rows of the trees and nowhere else.
        rows: the requests, their blocks and the mask.
        scale: of the scores, positive.
        own: keys and values of the forward's rows, each [tokens, kv_heads, head_size], of any token
            stride. Where given, the trees' rows have theirs from here, and nothing behind the
            context is read from the cache.

    """
    starts, lengths = rows.query_start_loc.tolist(), rows.seq_lens.tolist()
    paddings = [0] * rows.batch if rows.num_padding is None else rows.num_padding.tolist()
    for request, padding in enumerate(paddings):
        flat = slice(starts[request] + padding, starts[request + 1])
        num_rows, length = flat.stop - flat.start, lengths[request] - padding
        if num_rows == 0:
            continue
        cached = length if own is None else length - num_rows
        keys, values = _gather(kv_cache, rows.block_table[request], cached)
        if own is not None:
            keys, values = (
                torch.cat((context, side[flat].float()))
                for context, side in zip((keys, values), own, strict=True)
            )
        visible = _visible(rows.ancestor_bits, padding, num_rows, length)
        group = query.shape[1] // keys.shape[1]
        scores = torch.einsum(
            "rhd,thd->hrt", query[flat].float(), keys.repeat_interleave(group, dim=1)
        )
        weights = (scores * scale).masked_fill(~visible, float("-inf")).softmax(dim=-1)
        attended = torch.einsum("hrt,thd->rhd", weights, values.repeat_interleave(group, dim=1))
        output[flat] = attended.to(output.dtype)


def _gather(
    kv_cache: torch.Tensor, blocks: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a request's tokens, each float32 [length, kv_heads, head_size]."""
    token = torch.arange(length, device=kv_cache.device)
    block_size = kv_cache.shape[2]
    pairs = kv_cache[blocks[token // block_size].long(), :, token % block_size].float()
    keys, values = pairs.chunk(2, dim=-1)
    return keys, values


def _visible(ancestor_bits: torch.Tensor, first: int, num_rows: int, length: int) -> torch.Tensor:
    """bool [num_rows, length]: the whole context, and the ancestors of the rows from `first` on."""
    row = torch.arange(first, first + num_rows, device=ancestor_bits.device)
    words = ancestor_bits[row[:, None], row // WORD_BITS]
    visible = torch.ones(num_rows, length, dtype=torch.bool, device=ancestor_bits.device)
    visible[:, length - num_rows :] = (words >> row % WORD_BITS) & 1 != 0
    return visible
