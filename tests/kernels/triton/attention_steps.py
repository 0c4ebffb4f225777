"""Steps of tree attention for the tests: random tensors, and what no request has written as NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.kernels.triton import torch_twins
from vllm_recycle.core.tree import TreeTemplate, load_tree
from vllm_recycle.kernels.triton.attention.queries import TreeQueries
from vllm_recycle.kernels.triton.attention.tiles import Tile
from vllm_recycle.kernels.triton.attention.tree_attention import tree_attention
from vllm_recycle.kernels.triton.trees import DeviceTrees

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNTOUCHED = -7.0
# What block tables hold behind a request's last block; no cache is that large.
NO_BLOCK = 2**30
# Small, so that a few rows are several tiles and a short context several shares.
SMALL = Tile(queries=32, tokens=16, warps=4)


def below_chain(tree: TreeTemplate, length: int) -> TreeTemplate:
    """The tree with so many rows above its root."""
    chain = [(row, 0) for row in range(length)]
    return TreeTemplate((*chain, *((length + parent, rank) for parent, rank in tree.nodes)))


@dataclass(frozen=True)
class Request:
    """A request of a step; one without rows is padding. `padding` are rows before its others."""

    rows: int
    context: int
    padding: int = 0

    @property
    def length(self) -> int:
        return self.rows + self.context if self.rows else 0


# The trees are prefixes of one template; the padding lies between them and behind them.
STEP = (Request(26, 150), Request(0, 0), Request(9, 37), Request(3, 0), Request(0, 0))

PAPER = load_tree("paper-80")
CHAIN = TreeTemplate(tuple((row, 0) for row in range(40)))
CHAINED = below_chain(PAPER, 4)
# Each lacks other rows of the chain, or none.
PADDED = (Request(29, 150, padding=3), Request(0, 0, padding=2), Request(9, 37), Request(3, 0, 4))

# Of the heads of a `Shape`: beside scores that are mostly within 3, little, some, and nearly all of
# the weight; and none at all.
SINKS = torch.tensor([-2.0, 4.0, 12.0, float("-inf")], device=DEVICE)

# Outputs are averages of standard normal values, hence below 4 in magnitude: a rounding is off by
# 2^-7 or 2^-10 at most, and results differ by a few (of outputs, and of weights before the sum). In
# float32 sums over some hundred terms are what differs, by several times 2^-22.
TOLERANCE = {torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float32: 2**-18}


def assert_close(output: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[output.dtype]
    torch.testing.assert_close(output.float(), expected.float(), atol=tolerance, rtol=0)


@dataclass(frozen=True)
class Shape:
    """Of a step's tensors."""

    head_size: int = 64
    group: int = 2
    kv_heads: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    # Whether the tokens of a block are stored before its heads, as vLLM's backends have it.
    tokens_first: bool = True


@dataclass(frozen=True)
class Step:
    """The tensors of a step."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    rows: TreeQueries
    own: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def make(
        cls,
        tree: TreeTemplate,
        requests: tuple[Request, ...] = STEP,
        shape: Shape | None = None,
        *,
        own: bool = False,
    ) -> Step:
        """Random keys, values and queries; NaN in every slot that holds no token.

        With `own` no slot holds a tree's row, and all rows that are no tree's are NaN in `own`.
        """
        torch.manual_seed(0)
        shape = shape or Shape()

        def of_requests(name: str) -> torch.Tensor:
            return torch.tensor([getattr(request, name) for request in requests])

        padding = of_requests("padding")
        lengths = padding + of_requests("rows")
        starts = F.pad(lengths.cumsum(0), (1, 0))
        needed = [-(-request.length // shape.block_size) for request in requests]
        # The keys beside others, as with queries; the values of another stride.
        own_keys = torch.full((int(starts[-1]), 3 * shape.kv_heads, shape.head_size), float("nan"))
        own_keys = own_keys.to(DEVICE, shape.dtype)[:, shape.kv_heads : 2 * shape.kv_heads]
        own_values = own_keys.contiguous()
        sizes = [shape.kv_heads, shape.block_size]
        sizes = sizes[::-1] if shape.tokens_first else sizes
        kv_cache = own_keys.new_full((sum(needed) + 2, *sizes, 2 * shape.head_size), float("nan"))
        kv_cache = kv_cache.transpose(1, 2) if shape.tokens_first else kv_cache
        block_table = torch.full((len(requests), max(needed) + 3), NO_BLOCK, dtype=torch.int32)
        blocks = torch.randperm(len(kv_cache))
        for index, request in enumerate(requests):
            mine, blocks = blocks[: needed[index]], blocks[needed[index] :]
            token = torch.arange(request.context if own else request.length)
            used = -(-len(token) // shape.block_size)
            block_table[index, :used] = mine[:used]
            pairs = torch.randn(request.length, shape.kv_heads, 2 * shape.head_size)
            pairs = pairs.to(DEVICE, shape.dtype)
            kv_cache[mine[token // shape.block_size], :, token % shape.block_size] = pairs[
                : len(token)
            ]
            flat = slice(starts[index] + request.padding, starts[index + 1])
            own_keys[flat], own_values[flat] = pairs[request.context :].chunk(2, dim=-1)
        trees = DeviceTrees.of(tree, len(requests), DEVICE)
        rows = TreeQueries(
            ancestor_bits=trees.ancestor_bits,
            depths=trees.depths,
            idx_mapping=torch.arange(len(requests), device=DEVICE),
            query_start_loc=starts.to(DEVICE, torch.int32),
            seq_lens=(padding + of_requests("length")).to(DEVICE, torch.int32),
            block_table=block_table.to(DEVICE)[:, :-1],
            max_rows=int(lengths.max()),
            num_rows=int(starts[-1]),
            num_padding=padding.to(DEVICE, torch.int32) if padding.any() else None,
        )
        # Two rows behind the last tree, and beside each query what a fused projection has there.
        width = (shape.group + 2) * shape.kv_heads
        query = torch.randn(int(starts[-1]) + 2, width, shape.head_size).to(DEVICE, shape.dtype)
        query = query[:, : shape.group * shape.kv_heads]
        given = (own_keys, own_values) if own else None
        return cls(query, kv_cache, rows, given)

    def slot_of(self, request: int, token: int) -> tuple[int, slice, int]:
        """Where a token's keys and values lie in the cache."""
        block_size = self.kv_cache.shape[2]
        block = int(self.rows.block_table[request, token // block_size])
        return block, slice(None), token % block_size

    def attend(self, function: Callable[..., None] = tree_attention, **given: Any) -> torch.Tensor:
        """The output of the kernels; `given` are their window, sinks, splits and tile."""
        if function is tree_attention:
            given = {"tile": SMALL, **given}
        output = torch.full_like(self.query, UNTOUCHED)
        of_step = {"rows": self.rows, "scale": self.query.shape[2] ** -0.5, "own": self.own}
        function(self.query, self.kv_cache, output, **of_step, **given)
        return output

    def attend_in_torch(self, *, tile: Tile | None = None, **given: Any) -> torch.Tensor:
        """The same, whatever the tile."""
        return self.attend(torch_twins.tree_attention, **given)
