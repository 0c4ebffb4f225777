"""Steps of tree attention on CPU for the tests: what is given, and what should come of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cache_layouts import KV_HEADS, Layout, halves, write
from vllm import _custom_ops as ops

from vllm_recycle.core.tree import TreeTemplate, load_tree
from vllm_recycle.kernels.cpu.cache_calls import TreeQueries, tree_attention

HEADS = 6  # three queries a key: grouped-query attention
UNTOUCHED = -7.0
# Beside scores that are mostly within 3, for each head: from little of the weight to nearly all.
SINKS = torch.tensor([-30.0, -2.0, 1.0, 4.0, 12.0, 30.0])
# What block tables hold behind the context where the rows are not in the cache.
NO_BLOCK = 2**30


@dataclass(frozen=True)
class Sequence:
    """A sequence of a step: `num_nodes` of the template, after the context, in these blocks."""

    num_nodes: int
    num_context: int
    first: int
    blocks: tuple[int, ...]


# Rows 0, 4 and two behind the last tree belong to no tree. In blocks of 32 tokens the third tree
# runs from one block into the next; the second has no context. The smaller trees end in a node
# that is no ancestor of the largest tree's last, so that their padding would show.
STEP = [
    Sequence(num_nodes=25, num_context=70, first=5, blocks=(3, 0, 4)),
    Sequence(num_nodes=2, num_context=0, first=1, blocks=(5,)),
    Sequence(num_nodes=10, num_context=27, first=31, blocks=(2, 1)),
]


def rows_of(sequence: Sequence) -> slice:
    return slice(sequence.first, sequence.first + sequence.num_nodes + 1)


@dataclass(frozen=True)
class Step:
    """A step's tensors: queries, the cache as vLLM wrote it, and the dense keys and values."""

    layout: Layout
    query: torch.Tensor
    kv_cache: torch.Tensor
    dense: list[tuple[torch.Tensor, torch.Tensor]]
    block_table: torch.Tensor
    own: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def make(
        cls,
        layout: Layout,
        sequences: list[Sequence] = STEP,
        *,
        own: bool = False,
        heads: int = HEADS,
    ) -> Step:
        """With `own` the cache holds the contexts alone, and NaN, and no block is behind them."""
        torch.manual_seed(0)
        # Two more behind the last tree.
        num_rows = max(rows_of(sequence).stop for sequence in sequences) + 2
        num_blocks = 1 + max(max(sequence.blocks) for sequence in sequences)
        kv_cache, dense = layout.empty_cache()[:1].repeat(num_blocks, 1, 1, 1), []
        width = max(len(sequence.blocks) for sequence in sequences) + 1
        block_table = torch.zeros(len(sequences), width, dtype=torch.int32)
        # The keys between others, as a fused projection has them; the values of another stride.
        own_keys = torch.full((num_rows, 3 * KV_HEADS, layout.head_size), float("nan"))
        own_keys = own_keys.to(layout.dtype)[:, KV_HEADS : 2 * KV_HEADS]
        own_values = own_keys.contiguous()
        if own:
            kv_cache.fill_(float("nan"))
            block_table.fill_(NO_BLOCK)
        for index, sequence in enumerate(sequences):
            length = sequence.num_context + sequence.num_nodes + 1
            keys, values = layout.random_keys_values(length)
            dense.append((keys, values))
            cached = sequence.num_context if own else length
            position = torch.arange(cached)
            blocks = torch.tensor(sequence.blocks)[: -(-cached // layout.block_size)]
            block_table[index, : len(blocks)] = blocks
            slots = blocks[position // layout.block_size] * layout.block_size
            slots += position % layout.block_size
            write(kv_cache, keys[:cached], values[:cached], slots, layout.isa)
            own_keys[rows_of(sequence)] = keys[sequence.num_context :]
            own_values[rows_of(sequence)] = values[sequence.num_context :]
        query = torch.randn(num_rows, heads, layout.head_size).to(layout.dtype)
        given = (own_keys, own_values) if own else None
        return cls(layout, query, kv_cache, dense, block_table, given)

    @property
    def scale(self) -> float:
        return self.layout.head_size**-0.5

    def tree_rows(self, tree: TreeTemplate, sequences: list[Sequence] = STEP) -> TreeQueries:
        return TreeQueries(
            trees=tree.of_batch(len(sequences)),
            first=torch.tensor([sequence.first for sequence in sequences]),
            num_rows=torch.tensor([sequence.num_nodes + 1 for sequence in sequences]),
            num_context=torch.tensor([sequence.num_context for sequence in sequences]),
            block_table=self.block_table,
            block_size=self.layout.block_size,
        )

    def attend(
        self,
        trees: TreeQueries,
        *,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output = torch.full_like(self.query, UNTOUCHED)
        tree_attention(
            self.query,
            self.kv_cache,
            output,
            trees=trees,
            scale=self.scale,
            isa=self.layout.isa,
            own=self.own,
            window=window,
            sinks=sinks,
        )
        return output

    def reference(
        self,
        tree: TreeTemplate,
        sequences: list[Sequence] = STEP,
        *,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Row by row in double precision, over the context and the row's ancestors alone.

        With a window, over so many of them: a path from the first token has each position once.
        A sink is one more score, of no value.
        """
        output = torch.full_like(self.query, UNTOUCHED, dtype=torch.float64)
        for sequence, (keys, values) in zip(sequences, self.dense, strict=True):
            group = self.query.shape[1] // KV_HEADS
            keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
            for row in range(sequence.num_nodes + 1):
                path = [row]
                while path[0]:
                    path.insert(0, tree.nodes[path[0] - 1][0])
                seen = [*range(sequence.num_context), *(sequence.num_context + r for r in path)]
                seen = seen[-(window or len(seen)) :]
                query = self.query[sequence.first + row].double()
                scores = (keys[seen] * query).sum(dim=2) * self.scale
                if sinks is not None:
                    scores = torch.cat((scores, sinks.double()[None]))
                weights = scores.softmax(dim=0)[: len(seen), :, None]
                output[sequence.first + row] = (weights * values[seen]).sum(dim=0)
        return output


DEEP_END = ((9, 0), (9, 1), (21, 0), (23, 0), (24, 1))
BUSH = TreeTemplate((*load_tree("paper-80").nodes[:20], *DEEP_END))


def causal_attention(
    step: Step,
    sequences: list[Sequence],
    *,
    window: int = -1,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same rows through vLLM's kernel, as its CPU backend calls it, in batch order."""
    layout, dtype = step.layout, torch.int32
    lengths = torch.tensor([sequence.num_nodes + 1 for sequence in sequences], dtype=dtype)
    context = torch.tensor([sequence.num_context for sequence in sequences], dtype=dtype)
    query_start_loc = torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=dtype)))
    query = torch.cat([step.query[rows_of(sequence)] for sequence in sequences])
    scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(sequences),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=layout.head_size,
        seq_lens=context + lengths,
        dtype=layout.dtype,
        query_start_loc=query_start_loc,
        causal=True,
        sliding_window_size=window,
        isa=layout.isa,
        enable_kv_split=True,
    )
    key_cache, value_cache = halves(step.kv_cache)
    output = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        output=output,
        query_start_loc=query_start_loc,
        seq_lens=context + lengths,
        scale=step.scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=window,
        block_table=step.block_table,
        softcap=0.0,
        scheduler_metadata=scheduler_metadata,
        s_aux=sinks,
    )
    return output
