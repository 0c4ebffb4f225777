"""Tree attention over vLLM's paged KV cache on CPU: gather, then SDPA under the tree's mask.

vLLM's own CPU kernel takes no mask and returns no log-sum-exp, so rows of a tree cannot go
through it. All trees of a step are served by one call a layer, padded to the longest. This is the
reference; `cache_calls.tree_attention` reads the cache where it is.

The keys and values of the trees' rows are in the cache behind the context, or, where they have no
slots there, those of the forward itself (`own`). A layer that shares another layer's cache has none
of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F

from vllm_recycle.core.tree import Trees
from vllm_recycle.kernels.cpu.kv_cache import gather_keys_values


@dataclass(frozen=True, eq=False)  # no slots: the derived tensors are cached
class TreeQueries:
    """The rows of a step that are trees; what all layers of a step share.

    Attributes:
        trees: of the requests; each has a prefix of its rows.
        first: int64 [batch], the flat row of each tree's root.
        num_rows: int64 [batch], rows of each tree, the root included.
        num_context: int64 [batch], tokens before the root.
        block_table: int32 [batch, n], the blocks of each request, enough for context and rows; for
            the context, and anything behind it, where the rows' keys and values are given.
        block_size: tokens a block.
        are_cached: whether the rows' keys and values are in the cache.

    """

    trees: Trees
    first: torch.Tensor
    num_rows: torch.Tensor
    num_context: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    are_cached: bool = True

    def select(self, chosen: torch.Tensor) -> TreeQueries:
        """Only the requests where `chosen`, bool [batch], is true."""
        names = ("first", "num_rows", "num_context", "block_table")
        rows = {name: getattr(self, name)[chosen] for name in names}
        return replace(self, trees=self.trees.select(chosen), **rows)

    @cached_property
    def rows(self) -> torch.Tensor:
        """int64 [batch, rows], the flat row of each tree row; smaller trees repeat their last."""
        row = torch.arange(int(self.num_rows.max()))[None]
        return self.first[:, None] + row.minimum(self.num_rows[:, None] - 1)

    @cached_property
    def used_blocks(self) -> torch.Tensor:
        """int64 [batch, blocks], without the blocks that no request has reached."""
        num_blocks = -(-int((self.num_context + self.num_rows).max()) // self.block_size)
        return self.block_table[:, :num_blocks].long()

    @cached_property
    def visible(self) -> torch.Tensor:
        """bool [batch, 1, rows, keys]: the whole context, and each row's ancestors."""
        rows = int(self.num_rows.max())
        # A key is at column c - num_context of its tree. Columns are looked up in a table that
        # has one more on the left for the context, and one on the right for what lies behind.
        keys = torch.arange(self.used_blocks.shape[1] * self.block_size)
        column = keys[None] - self.num_context[:, None]
        column = column.clamp(min=-1).masked_fill(column >= self.num_rows[:, None], rows)
        table = torch.zeros(len(column), rows, rows + 2, dtype=torch.bool)
        table[:, :, 0] = True
        table[:, :, 1:-1] = self.trees.ancestor_mask[:, :rows, :rows]
        return table.gather(2, (column + 1)[:, None].expand(-1, rows, -1))[:, None]

    @cached_property
    def in_context(self) -> torch.Tensor:
        """bool [batch, tokens], for whole blocks, one and as many as the longest context has."""
        num_blocks = max(1, -(-int(self.num_context.max()) // self.block_size))
        return torch.arange(num_blocks * self.block_size)[None] < self.num_context[:, None]

    @cached_property
    def context_blocks(self) -> torch.Tensor:
        """int64 [batch, blocks], those of shorter contexts filled up with block 0."""
        reached = self.in_context[:, :: self.block_size]
        return self.block_table[:, : reached.shape[1]].long().where(reached, 0)

    @cached_property
    def visible_with_own(self) -> torch.Tensor:
        """bool [batch, 1, rows, tokens + rows]: the whole context, and each row's ancestors."""
        rows = self.rows.shape[1]
        context = self.in_context[:, None].expand(-1, rows, -1)
        ancestors = self.trees.ancestor_mask[:, :rows, :rows]
        return torch.cat((context, ancestors), dim=2)[:, None]

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [batch, rows], of the tree's rows: siblings share one."""
        return self.num_context[:, None] + self.trees.depths[:, : self.rows.shape[1]]

    def in_window(self, window: int, *, own: bool) -> torch.Tensor:
        """bool [batch, 1, rows, keys]: those keys of `visible` whose position is in the window.

        Args:
            window: positions up to a row's own that it sees.
            own: of `visible_with_own`.

        """
        if own:
            tokens = torch.arange(self.in_context.shape[1]).expand(len(self.positions), -1)
            keys = torch.cat((tokens, self.positions), dim=1)
        else:
            token = torch.arange(self.used_blocks.shape[1] * self.block_size)[None]
            row = (token - self.num_context[:, None]).clamp(0, self.positions.shape[1] - 1)
            in_context = token < self.num_context[:, None]
            keys = token.where(in_context, self.positions.gather(1, row))
        return (keys[:, None] > self.positions[:, :, None] - window)[:, None]


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    *,
    trees: TreeQueries,
    scale: float,
    isa: str,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend from every tree row to its context and its ancestors; their KV is written already.

    Args:
        query: [tokens, heads, head_size].
        kv_cache: [blocks, kv_heads, block_size, 2 * head_size].
        output: [tokens, heads, head_size], written at the rows of the trees.
        trees: the rows and their mask.
        scale: of the scores.
        isa: layout of the cache.
        own: keys and values of the forward's rows, each [tokens, kv_heads, head_size], of any token
            stride. Where given, the trees' rows have theirs from here, and nothing behind the
            context is read from the cache.
        window: of the layer, how many positions up to its own a row sees; None for all.
        sinks: floating point [heads], a score, scaled already, that each head's softmax has beside
            those of the keys, and that no value belongs to; None for none.

    """
    if own is None:
        keys, values = gather_keys_values(kv_cache, trees.used_blocks, isa=isa)
        visible = trees.visible
    else:
        # What lies behind a context may be anything, and weights of 0 do not undo a NaN.
        behind = ~trees.in_context[:, None, :, None]
        context = gather_keys_values(kv_cache, trees.context_blocks, isa=isa)
        keys, values = (
            torch.cat((cached.masked_fill(behind, 0), side[trees.rows].transpose(1, 2)), dim=2)
            for cached, side in zip(context, own, strict=True)
        )
        visible = trees.visible_with_own
    if window is not None:
        visible = visible & trees.in_window(window, own=own is not None)
    mask = visible
    if sinks is not None:
        # A key and a value of zeros, whose score is what is added to it.
        keys, values = (F.pad(side, (0, 0, 0, 1)) for side in (keys, values))
        mask = _with_sinks(visible, sinks)
    attended = F.scaled_dot_product_attention(
        query[trees.rows].transpose(1, 2),
        keys,
        values,
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    ).transpose(1, 2)
    real = torch.arange(trees.rows.shape[1])[None] < trees.num_rows[:, None]
    output[trees.rows[real]] = attended[real]


def _with_sinks(visible: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """float32 [batch, heads, rows, keys + 1]: 0 or -inf for each key, and each head's sink."""
    added = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    of_heads = added.expand(-1, len(sinks), -1, -1)
    return torch.cat((of_heads, sinks.float()[:, None, None].expand_as(of_heads[..., :1])), dim=3)
