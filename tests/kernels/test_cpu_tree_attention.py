"""Tree attention on CPU: against a softmax in double precision, and against vLLM's own kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from test_cpu_kv_cache import KV_HEADS, Layout, every_layout, halves, write
from vllm import _custom_ops as ops

from vllm_recycle.core import TreeTemplate, load_tree
from vllm_recycle.kernels.cpu_tree_attention import TreeRows, make_tree_rows, tree_attention

HEADS = 6  # three queries a key: grouped-query attention
UNTOUCHED = -7.0

# Outputs are averages of standard normal values, hence below 4 in magnitude. Probabilities and
# outputs are rounded to the type of the cache: a few roundings of 2^-8, 2^-11 and 2^-24 of that.
TOLERANCE = {torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float32: 2**-18}


@dataclass(frozen=True)
class Sequence:
    """A sequence of a step: `num_nodes` of the template, after the context, in these blocks."""

    num_nodes: int
    num_context: int
    first: int
    blocks: tuple[int, ...]


# Rows 0, 4 and those behind the last tree belong to no tree. In blocks of 32 tokens the third tree
# runs from one block into the next; the second has no context. The smaller trees end in a node
# that is no ancestor of the largest tree's last, so that their padding would show.
STEP = [
    Sequence(num_nodes=25, num_context=70, first=5, blocks=(3, 0, 4)),
    Sequence(num_nodes=2, num_context=0, first=1, blocks=(5,)),
    Sequence(num_nodes=10, num_context=27, first=31, blocks=(2, 1)),
]
NUM_ROWS = 44


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

    @classmethod
    def make(cls, layout: Layout, sequences: list[Sequence] = STEP) -> Step:
        torch.manual_seed(0)
        kv_cache, dense = layout.empty_cache(), []
        width = max(len(sequence.blocks) for sequence in sequences) + 1
        block_table = torch.zeros(len(sequences), width, dtype=torch.int32)
        for index, sequence in enumerate(sequences):
            blocks = torch.tensor(sequence.blocks)
            block_table[index, : len(blocks)] = blocks
            position = torch.arange(sequence.num_context + sequence.num_nodes + 1)
            slots = blocks[position // layout.block_size] * layout.block_size
            keys, values = layout.random_keys_values(len(position))
            write(kv_cache, keys, values, slots + position % layout.block_size, layout.isa)
            dense.append((keys, values))
        query = torch.randn(NUM_ROWS, HEADS, layout.head_size).to(layout.dtype)
        return cls(layout, query, kv_cache, dense, block_table)

    @property
    def scale(self) -> float:
        return self.layout.head_size**-0.5

    def tree_rows(self, tree: TreeTemplate, sequences: list[Sequence] = STEP) -> TreeRows:
        return make_tree_rows(
            tree=tree,
            first=torch.tensor([sequence.first for sequence in sequences]),
            num_rows=torch.tensor([sequence.num_nodes + 1 for sequence in sequences]),
            num_context=torch.tensor([sequence.num_context for sequence in sequences]),
            block_table=self.block_table,
            block_size=self.layout.block_size,
            dtype=self.layout.dtype,
        )

    def attend(self, trees: TreeRows) -> torch.Tensor:
        output = torch.full_like(self.query, UNTOUCHED)
        tree_attention(
            self.query,
            self.kv_cache,
            output,
            trees=trees,
            scale=self.scale,
            isa=self.layout.isa,
        )
        return output

    def reference(self, tree: TreeTemplate) -> torch.Tensor:
        """Row by row in double precision, over the context and the row's ancestors alone."""
        output = torch.full_like(self.query, UNTOUCHED, dtype=torch.float64)
        for sequence, (keys, values) in zip(STEP, self.dense, strict=True):
            for row in range(sequence.num_nodes + 1):
                seen = [*range(sequence.num_context), sequence.num_context + row]
                ancestor = row
                while ancestor:
                    ancestor = tree.nodes[ancestor - 1][0]
                    seen.append(sequence.num_context + ancestor)
                for head in range(HEADS):
                    kv_head = head // (HEADS // KV_HEADS)
                    query = self.query[sequence.first + row, head].double()
                    scores = keys[seen, kv_head].double() @ query * self.scale
                    output[sequence.first + row, head] = (
                        scores.softmax(dim=0) @ values[seen, kv_head].double()
                    )
        return output


def largest_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference.double()).abs().max())


def is_within_tolerance(output: torch.Tensor, reference: torch.Tensor) -> bool:
    return largest_error(output, reference) <= TOLERANCE[output.dtype]


DEEP_END = ((9, 0), (9, 1), (21, 0), (23, 0), (24, 1))
BUSH = TreeTemplate((*load_tree("paper-80").nodes[:20], *DEEP_END))


@every_layout
def test_trees_of_a_step_equal_a_softmax_over_context_and_ancestors(layout):
    step = Step.make(layout)
    output = step.attend(step.tree_rows(BUSH))
    assert is_within_tolerance(output, step.reference(BUSH))


@every_layout
def test_rows_outside_the_trees_are_left_alone(layout):
    step = Step.make(layout)
    output = step.attend(step.tree_rows(BUSH))
    outside = torch.ones(NUM_ROWS, dtype=torch.bool)
    for sequence in STEP:
        outside[rows_of(sequence)] = False
    assert outside.sum() == NUM_ROWS - sum(sequence.num_nodes + 1 for sequence in STEP)
    assert output[outside].eq(UNTOUCHED).all()


@every_layout
def test_trees_of_one_size_need_no_repetitions_and_attend_alike(layout):
    step = Step.make(layout)
    together = step.attend(step.tree_rows(BUSH))
    for index, sequence in enumerate(STEP):
        alone = Step(layout, step.query, step.kv_cache, [], step.block_table[index : index + 1])
        trees = alone.tree_rows(BUSH, [sequence])
        assert trees.real is None
        rows = rows_of(sequence)
        assert is_within_tolerance(alone.attend(trees)[rows], together[rows])


@every_layout
@pytest.mark.parametrize("bias", [float("-inf"), 0.0], ids=["hidden ancestor", "shown stranger"])
def test_a_mask_that_is_wrong_in_one_place_is_seen(layout, bias):
    step = Step.make(layout)
    trees = step.tree_rows(BUSH)
    # Node 25, the last, has ancestors 24 and 23; nodes 22 and 23 are no relatives of node 20.
    row, key = (25, 24) if bias else (20, 22)
    wrong = trees.bias.clone()
    assert wrong[0, 0, row, STEP[0].num_context + key] != bias
    wrong[0, 0, row, STEP[0].num_context + key] = bias
    output, reference = step.attend(replace(trees, bias=wrong)), step.reference(BUSH)
    assert not is_within_tolerance(output, reference)
    changed = STEP[0].first + row
    output[changed] = reference[changed].to(output.dtype)
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
def test_a_tree_that_is_a_chain_equals_the_causal_kernel_of_vllm(layout):
    step = Step.make(layout)
    chain = TreeTemplate(tuple((row, 0) for row in range(25)))
    causal = causal_attention(step, STEP)
    for tree, equal in ((chain, True), (BUSH, False)):
        output = step.attend(step.tree_rows(tree))
        rows = torch.cat([output[rows_of(sequence)] for sequence in STEP])
        assert is_within_tolerance(rows, causal) == equal
