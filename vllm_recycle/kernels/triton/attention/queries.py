"""The rows that tree attention is given over vLLM's paged KV cache, and what they see.

A request with a tree has R rows, the root and then a prefix of its tree's nodes; they are its
last R tokens, and the C tokens before them are its context. The keys and values of all C + R
tokens lie in the cache already, in linear slots: row r is token C + r. A row attends to the whole
context, to its ancestors and to itself.

Where the rows have no slots, theirs are those of the forward itself (`own`), and the cache has the
context's alone. A layer that shares another layer's cache has none of its own.

Names of dimensions, beside those of `vllm_recycle.core.tree`:

    tokens  rows of the step, of all requests     heads     of the queries, a multiple of kv_heads
    words   32 rows each, to hold all rows        n         blocks that a request may have
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TreeQueries:
    """The tree rows of a step; what all layers of a step share.

    Attributes:
        ancestor_bits: int32 [max_num_reqs, rows, words], see the function of that name; a tree's
            are contiguous.
        depths: integer [max_num_reqs, rows], of any first stride. A layer with a sliding window
            counts positions by them.
        idx_mapping: integer [batch], which of these trees is a request's.
        query_start_loc: int32 [batch + 1], the flat row of each request's root, and the end. A
            request without rows is passed over.
        seq_lens: int32 [batch], tokens of each request with rows and padding; any without rows.
        block_table: int32 [batch, n], the blocks of each request; only those that hold its tokens
            are read, and with `own` those of its context.
        max_rows: at least the rows of any request, at most those of a tree. On the host, because
            grids are made from it.
        num_rows: of all these requests, on the host.
        num_padding: int32 [batch], how many of a request's first rows are none; None where all are
            rows. They are neither seen nor written, and its context ends at the row behind them.
            They may only be what a tree begins with as a chain, above all other rows.
        launches: what layers of a kind have in common, by that kind; kept by `tree_attention`.

    """

    ancestor_bits: torch.Tensor
    depths: torch.Tensor
    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_rows: int
    num_rows: int
    num_padding: torch.Tensor | None = None
    launches: dict[Any, Callable[[dict[str, Any]], None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def batch(self) -> int:
        return self.seq_lens.shape[0]
