"""Steps of tree attention on CPU for the tests: what is given, and what should come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from tests.kernels.cpu.cache_layouts import STALE, Layout, write
from tests.kernels.triton.attention_steps import NO_BLOCK, UNTOUCHED
from tests.kernels.triton.torch_twins import attend
from vllm_recycle.core.tree import Trees, TreeTemplate, load_tree
from vllm_recycle.kernels.cpu.cache_calls import TreeQueries, tree_attention

DEEP_END = ((9, 0), (9, 1), (21, 0), (23, 0), (24, 1))
BUSH = TreeTemplate((*load_tree("paper-80").nodes[:20], *DEEP_END))


@dataclass(frozen=True)
class Text:
    """A text's keys and values, each [tokens, kv_heads, head_size], and a query a tree row."""

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    context: int
    parents: list[int]

    @property
    def visible(self) -> torch.Tensor:
        """bool [rows, tokens], which tokens a row sees."""
        below = Trees.from_parents(torch.tensor([self.parents])).ancestor_mask[0]
        return F.pad(below, (self.context, 0), value=True)


def texts_of(layout: Layout, *sizes: tuple[int, Sequence[int]]) -> list[Text]:
    """Random texts, from the context and the parents of the rows of each."""
    torch.manual_seed(0)
    texts = []
    for context, parents in sizes:
        keys, values = layout.random_keys_values(context + len(parents))
        queries = torch.randn(len(parents), layout.heads, layout.head_size).to(layout.dtype)
        texts.append(Text(keys, values, queries, context, list(parents)))
    return texts


def bushes(layout: Layout) -> list[Text]:
    """The second has no context, and in blocks of 32 tokens the third runs into the next one.

    The smaller trees end in a node that is no ancestor of the largest tree's last, so that their
    padding would show.
    """
    parents = BUSH.parents.tolist()
    return texts_of(layout, (70, parents), (0, parents[:3]), (27, parents[:11]))


def sinks_of(layout: Layout) -> torch.Tensor:
    """From none and little of the weight to nearly all, on both sides of what vLLM rescales at."""
    sinks = torch.linspace(-30, 30, layout.heads).to(layout.dtype)
    sinks[1] = float("-inf")
    return sinks


def fill(
    layout: Layout, texts: Sequence[tuple[torch.Tensor, torch.Tensor]], *, stale: float = STALE
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of these keys and values, as vLLM writes it, and its block table."""
    size = layout.block_size
    each = 1 + max(len(keys) for keys, _ in texts) // size
    kv_cache = layout.empty_cache(len(texts) * each).fill_(stale)
    table = torch.randperm(len(texts) * each).view(len(texts), each)
    tokens = [torch.arange(len(keys)) for keys, _ in texts]
    slots = [row[t // size] * size + t % size for row, t in zip(table, tokens, strict=True)]
    keys, values = (torch.cat(side) for side in zip(*texts, strict=True))
    write(kv_cache, keys, values, torch.cat(slots), layout.isa)
    return kv_cache, table.int()


@dataclass(frozen=True)
class Step:
    """A step's tensors: queries, the cache as vLLM wrote it, and where the rows are."""

    layout: Layout
    query: torch.Tensor
    kv_cache: torch.Tensor
    queries: TreeQueries
    own: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def make(cls, layout: Layout, texts: Sequence[Text], *, own: bool = False) -> Step:
        """The texts' rows in another order, and before and behind each a row of no tree.

        With `own` the cache holds the contexts alone, and NaN, and no block is behind them.
        """
        num_rows = torch.tensor([len(text.parents) for text in texts])
        cached = [text.context + (0 if own else len(text.parents)) for text in texts]
        sides = [(t.keys[:n], t.values[:n]) for t, n in zip(texts, cached, strict=True)]
        kv_cache, table = fill(layout, sides, stale=float("nan") if own else STALE)
        for row, count in zip(table, cached, strict=True):
            row[-(-count // layout.block_size) :] = NO_BLOCK
        parents = [torch.tensor(text.parents) for text in texts]
        queries = TreeQueries(
            trees=Trees.from_parents(torch.nn.utils.rnn.pad_sequence(parents, batch_first=True)),
            root_rows=(1 + num_rows).flip(0).cumsum(0).flip(0) - num_rows,
            num_rows=num_rows,
            num_context=torch.tensor([text.context for text in texts]),
            block_table=table,
        )
        rows = 1 + int((1 + num_rows).sum())
        query = torch.randn(rows, layout.heads, layout.head_size).to(layout.dtype)
        # The keys between others, as a fused projection has them; the values of another stride.
        keys = torch.full((rows, 3 * layout.kv_heads, layout.head_size), float("nan"))
        keys = keys.to(layout.dtype)[:, layout.kv_heads : 2 * layout.kv_heads]
        values = keys.contiguous()
        step = cls(layout, query, kv_cache, queries, (keys, values) if own else None)
        for index, text in enumerate(texts):
            of_tree = step.rows_of(index)
            query[of_tree] = text.queries
            keys[of_tree], values[of_tree] = text.keys[text.context :], text.values[text.context :]
        return step

    def rows_of(self, index: int) -> slice:
        root = int(self.queries.root_rows[index])
        return slice(root, root + int(self.queries.num_rows[index]))

    def attend(
        self, *, window: int | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Our attention of all trees in one call: [tokens, heads, head_size]."""
        output = torch.full_like(self.query, UNTOUCHED)
        given = {"scale": self.layout.head_size**-0.5, "isa": self.layout.isa, "own": self.own}
        given |= {"trees": self.queries, "window": window, "sinks": sinks}
        tree_attention(self.query, self.kv_cache, output, **given)
        return output

    def tree_rows(self, output: torch.Tensor) -> torch.Tensor:
        """The rows of the trees, in the order of the texts."""
        num_trees = len(self.queries.root_rows)
        return torch.cat([output[self.rows_of(index)] for index in range(num_trees)])


def softmax_rows(
    texts: Sequence[Text], *, window: int | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """In double precision, see `torch_twins.attend`."""
    output = []
    for text in texts:
        given = {"scale": text.queries.shape[2] ** -0.5, "window": window, "sinks": sinks}
        output.append(attend(text.queries, text.keys, text.values, text.visible, **given))
    return torch.cat(output)
