"""Tree attention over vLLM's paged KV cache on CPU: gather, then SDPA under the tree's mask.

vLLM's own CPU kernel takes no mask and returns no log-sum-exp, so rows of a tree cannot go
through it. All trees of a step are served by one call a layer, padded to the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.kernels.cpu_kv_cache import gather_keys_values


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The rows of a step that are trees; what all layers of a step share.

    Attributes:
        rows: int64 [batch, rows], the flat row of each tree row; a tree with fewer rows than
            the largest repeats its last.
        real: bool [batch, rows], false in repetitions; None where there are none.
        block_table: int64 [batch, blocks], the blocks of each sequence, padded with any block.
        bias: [batch, 1, rows, keys], added to the scores: 0 where a row may look, else -inf.

    """

    rows: torch.Tensor
    real: torch.Tensor | None
    block_table: torch.Tensor
    bias: torch.Tensor


def make_tree_rows(
    *,
    tree: TreeTemplate,
    first: torch.Tensor,
    num_rows: torch.Tensor,
    num_context: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    dtype: torch.dtype,
) -> TreeRows:
    """Lay out the mask of a step's trees: the whole context, and each row's ancestors.

    Args:
        tree: the template; each sequence has a prefix of its rows.
        first: int64 [batch], the flat row of each root.
        num_rows: int64 [batch], rows of each tree, the root included.
        num_context: int64 [batch], tokens before the root.
        block_table: integer [batch, n], wide enough for context and rows.
        block_size: tokens a block.
        dtype: of the queries.

    """
    max_rows = int(num_rows.max())
    offset = torch.arange(max_rows)[None]
    real = offset < num_rows[:, None]
    num_blocks = -(-int((num_context + num_rows).max()) // block_size)
    # A key is at column c - num_context of its tree. Columns are looked up in a table that has
    # one more on the left for the context, and one on the right for what lies behind the tree.
    column = torch.arange(num_blocks * block_size)[None] - num_context[:, None]
    column = column.clamp_(min=-1).masked_fill_(column >= num_rows[:, None], max_rows)
    bias_of = torch.full((max_rows + 2, max_rows), float("-inf"), dtype=dtype)
    bias_of[0] = 0
    bias_of[1:-1].masked_fill_(tree.ancestor_mask[:max_rows, :max_rows].T, 0)
    return TreeRows(
        rows=first[:, None] + offset.minimum(num_rows[:, None] - 1),
        real=None if bool(real.all()) else real,
        block_table=block_table[:, :num_blocks].long(),
        bias=bias_of[column + 1].transpose(1, 2)[:, None],
    )


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    *,
    trees: TreeRows,
    scale: float,
    isa: str,
) -> None:
    """Attend from every tree row to its context and its ancestors; their KV is written already.

    Args:
        query: [tokens, heads, head_size].
        kv_cache: [blocks, kv_heads, block_size, 2 * head_size].
        output: [tokens, heads, head_size], written at the rows of the trees.
        trees: the rows and their mask.
        scale: of the scores.
        isa: layout of the cache.

    """
    keys, values = gather_keys_values(kv_cache, trees.block_table, isa=isa)
    attended = F.scaled_dot_product_attention(
        query[trees.rows].transpose(1, 2),
        keys,
        values,
        attn_mask=trees.bias,
        scale=scale,
        enable_gqa=True,
    ).transpose(1, 2)
    if trees.real is None:
        output[trees.rows] = attended
    else:
        output[trees.rows[trees.real]] = attended[trees.real]
