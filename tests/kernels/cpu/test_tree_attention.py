"""Tree attention on CPU, torch and C++: against a double-precision softmax, and vLLM's kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from cache_layouts import KV_HEADS, Layout, every_layout, halves, write
from tolerance import is_within_tolerance
from vllm import _custom_ops as ops

from vllm_recycle.core import BatchTrees, TreeTemplate, load_tree
from vllm_recycle.core.lookahead import lookahead_template
from vllm_recycle.core.tree import MAX_NODES
from vllm_recycle.kernels.cpu import native, tree_attention
from vllm_recycle.kernels.cpu.tree_attention import TreeRows

HEADS = 6  # three queries a key: grouped-query attention
UNTOUCHED = -7.0
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


Attention = Callable[..., None]


@pytest.fixture(scope="module", params=[tree_attention, native], ids=["torch", "c++"])
def attention(request) -> Attention:
    if request.param is native and native.load_library() is None:
        pytest.skip("no C++ compiler")
    return request.param.tree_attention


def rows_of(sequence: Sequence) -> slice:
    return slice(sequence.first, sequence.first + sequence.num_nodes + 1)


@pytest.fixture(params=[False, True], ids=["cached", "own"])
def own(request) -> bool:
    """Whether the keys and values of the rows are given, instead of cached."""
    return request.param


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
    def make(cls, layout: Layout, sequences: list[Sequence] = STEP, *, own: bool = False) -> Step:
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
        query = torch.randn(num_rows, HEADS, layout.head_size).to(layout.dtype)
        given = (own_keys, own_values) if own else None
        return cls(layout, query, kv_cache, dense, block_table, given)

    @property
    def scale(self) -> float:
        return self.layout.head_size**-0.5

    def tree_rows(self, tree: TreeTemplate, sequences: list[Sequence] = STEP) -> TreeRows:
        return TreeRows(
            trees=tree.of_batch(len(sequences)),
            first=torch.tensor([sequence.first for sequence in sequences]),
            num_rows=torch.tensor([sequence.num_nodes + 1 for sequence in sequences]),
            num_context=torch.tensor([sequence.num_context for sequence in sequences]),
            block_table=self.block_table,
            block_size=self.layout.block_size,
        )

    def attend(self, attention: Attention, trees: TreeRows) -> torch.Tensor:
        output = torch.full_like(self.query, UNTOUCHED)
        attention(
            self.query,
            self.kv_cache,
            output,
            trees=trees,
            scale=self.scale,
            isa=self.layout.isa,
            own=self.own,
        )
        return output

    def reference(self, tree: TreeTemplate, sequences: list[Sequence] = STEP) -> torch.Tensor:
        """Row by row in double precision, over the context and the row's ancestors alone."""
        output = torch.full_like(self.query, UNTOUCHED, dtype=torch.float64)
        for sequence, (keys, values) in zip(sequences, self.dense, strict=True):
            group = HEADS // KV_HEADS
            keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
            for row in range(sequence.num_nodes + 1):
                seen = [*range(sequence.num_context), sequence.num_context + row]
                ancestor = row
                while ancestor:
                    ancestor = tree.nodes[ancestor - 1][0]
                    seen.append(sequence.num_context + ancestor)
                query = self.query[sequence.first + row].double()
                scores = (keys[seen] * query).sum(dim=2) * self.scale
                weights = scores.softmax(dim=0)[:, :, None]
                output[sequence.first + row] = (weights * values[seen]).sum(dim=0)
        return output


DEEP_END = ((9, 0), (9, 1), (21, 0), (23, 0), (24, 1))
BUSH = TreeTemplate((*load_tree("paper-80").nodes[:20], *DEEP_END))


@every_layout
def test_trees_of_a_step_equal_a_softmax_over_context_and_ancestors(attention, layout, own):
    step = Step.make(layout, own=own)
    output = step.attend(attention, step.tree_rows(BUSH))
    assert is_within_tolerance(output, step.reference(BUSH))


@every_layout
def test_rows_outside_the_trees_are_left_alone(attention, layout, own):
    step = Step.make(layout, own=own)
    output = step.attend(attention, step.tree_rows(BUSH))
    outside = torch.ones(len(output), dtype=torch.bool)
    for sequence in STEP:
        outside[rows_of(sequence)] = False
    assert outside.sum() == 4
    assert output[outside].eq(UNTOUCHED).all()


@every_layout
def test_a_tree_alone_is_attended_to_as_in_a_batch(attention, layout, own):
    step = Step.make(layout, own=own)
    together = step.attend(attention, step.tree_rows(BUSH))
    for index, sequence in enumerate(STEP):
        alone = replace(step, block_table=step.block_table[index : index + 1])
        output = alone.attend(attention, alone.tree_rows(BUSH, [sequence]))
        rows = rows_of(sequence)
        assert is_within_tolerance(output[rows], together[rows])


@every_layout
def test_each_request_may_have_a_tree_of_its_own(attention, layout, own):
    step = Step.make(layout, own=own)
    width = BUSH.num_nodes + 1
    chain = torch.arange(-1, width - 1).clamp(min=0)
    star = torch.zeros(width, dtype=torch.int64)
    parents = torch.stack([(BUSH.parents, chain, star)[i % 3] for i in range(len(STEP))])
    trees = BatchTrees.from_parents(parents)
    together = step.attend(attention, replace(step.tree_rows(BUSH), trees=trees))
    for index, sequence in enumerate(STEP):
        alone = replace(step, block_table=step.block_table[index : index + 1])
        nodes = [(int(parent), row) for row, parent in enumerate(parents[index, 1:])]
        output = alone.attend(attention, alone.tree_rows(TreeTemplate(tuple(nodes)), [sequence]))
        rows = rows_of(sequence)
        assert is_within_tolerance(output[rows], together[rows])


LOOKAHEAD = lookahead_template(window=20, levels=5, guesses=20, length=6)
# Each node below one of the eight before it: deep, and wide.
LARGEST = TreeTemplate(tuple((max(0, node - node * 5 % 8), node % 8) for node in range(MAX_NODES)))


@every_layout
@pytest.mark.parametrize("tree", [LOOKAHEAD, LARGEST], ids=["lookahead", "largest"])
def test_large_trees_and_bare_roots_equal_a_softmax_over_context_and_ancestors(
    attention, layout, own, tree
):
    sequences = [
        Sequence(num_nodes=tree.num_nodes, num_context=64, first=2, blocks=tuple(range(10, 21))),
        Sequence(num_nodes=0, num_context=33, first=1, blocks=(9, 2)),
        Sequence(num_nodes=0, num_context=0, first=0, blocks=(3,)),
        Sequence(num_nodes=130, num_context=1, first=270, blocks=(8, 1, 0, 7, 4)),
    ]
    step = Step.make(layout, sequences, own=own)
    output = step.attend(attention, step.tree_rows(tree, sequences))
    assert is_within_tolerance(output, step.reference(tree, sequences))


@every_layout
def test_own_keys_and_values_give_what_cached_ones_give(attention, layout):
    cached, own = Step.make(layout), Step.make(layout, own=True)
    expected = cached.attend(attention, cached.tree_rows(BUSH))
    assert is_within_tolerance(own.attend(attention, own.tree_rows(BUSH)), expected)
    own.own[1][STEP[0].first] += 1
    assert not is_within_tolerance(own.attend(attention, own.tree_rows(BUSH)), expected)


@every_layout
@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
def test_what_is_given_for_a_row_is_seen_by_it_and_its_descendants_alone(attention, layout, side):
    step = Step.make(layout, own=True)
    before = step.attend(attention, step.tree_rows(BUSH))
    for row in (0, 1, 9, 25):
        other = Step.make(layout, own=True)
        other.own[side][STEP[0].first + row] = 3.0
        changed = (before != other.attend(attention, other.tree_rows(BUSH))).flatten(1).any(dim=1)
        assert changed[rows_of(STEP[0])].tolist() == BUSH.ancestor_mask[:, row].tolist()
        changed[rows_of(STEP[0])] = False
        assert not changed.any()


@every_layout
def test_a_context_is_read_from_the_cache(attention, layout):
    step = Step.make(layout, own=True)
    step.kv_cache.fill_(float("nan"))
    output = step.attend(attention, step.tree_rows(BUSH))
    for sequence in STEP:
        is_nan = output[rows_of(sequence)].isnan()
        assert is_nan.all() if sequence.num_context else not is_nan.any()


# Rows 1 and 2 are children of the root, and in all trees. One of these has no context, so that a
# wrong key has a weight that rounding cannot hide.
WRONG_MASKS = {"hidden ancestor": (2, 0, False), "shown sibling": (2, 1, True)}


@every_layout
@pytest.mark.parametrize(("row", "key", "shown"), WRONG_MASKS.values(), ids=WRONG_MASKS)
def test_a_mask_that_is_wrong_in_one_place_is_seen(attention, layout, own, row, key, shown):
    step = Step.make(layout, own=own)
    wrong = TreeTemplate(BUSH.nodes)
    assert wrong.ancestor_mask[row, key] != shown
    wrong.ancestor_mask[row, key] = shown
    output, reference = step.attend(attention, step.tree_rows(wrong)), step.reference(BUSH)
    assert not is_within_tolerance(output, reference)
    for sequence in STEP:
        output[sequence.first + row] = reference[sequence.first + row].to(output.dtype)
    assert is_within_tolerance(output, reference)


def causal_attention(step: Step, sequences: list[Sequence]) -> torch.Tensor:
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
        sliding_window_size=-1,
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
        sliding_window=-1,
        block_table=step.block_table,
        softcap=0.0,
        scheduler_metadata=scheduler_metadata,
        s_aux=None,
    )
    return output


@every_layout
def test_a_tree_that_is_a_chain_equals_the_causal_kernel_of_vllm(attention, layout, own):
    step = Step.make(layout, own=own)
    chain = TreeTemplate(tuple((row, 0) for row in range(25)))
    causal = causal_attention(Step.make(layout), STEP)
    for tree, equal in ((chain, True), (BUSH, False)):
        output = step.attend(attention, step.tree_rows(tree))
        rows = torch.cat([output[rows_of(sequence)] for sequence in STEP])
        assert is_within_tolerance(rows, causal) == equal
