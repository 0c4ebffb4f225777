"""Tree attention on CPU: against a double-precision softmax, and vLLM's kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_layouts import KV_HEADS, LAYOUTS, STALE, every_layout, skip_reason
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import trees
from tolerance import is_within_tolerance
from tree_steps import (
    BUSH,
    SINKS,
    STEP,
    UNTOUCHED,
    Sequence,
    Step,
    causal_attention,
    rows_of,
)

from vllm_recycle.core.lookahead import lookahead_template
from vllm_recycle.core.tree import MAX_NODES, Trees, TreeTemplate


@pytest.fixture(params=[False, True], ids=["cached", "own"])
def own(request) -> bool:
    """Whether the keys and values of the rows are given, instead of cached."""
    return request.param


@every_layout
def test_trees_of_a_step_equal_a_softmax_over_context_and_ancestors(layout, own):
    step = Step.make(layout, own=own)
    output = step.attend(step.tree_rows(BUSH))
    assert is_within_tolerance(output, step.reference(BUSH))


@settings(max_examples=60, deadline=None)
@given(tree=trees(), data=st.data(), own=st.booleans())
def test_any_trees_equal_a_softmax_over_context_and_ancestors(tree, data, own):
    layouts = [layout for layout in LAYOUTS if not skip_reason(layout.isa)]
    layout, first, sequences = data.draw(st.sampled_from(layouts)), 0, []
    for blocks in ((7, 2, 9, 0), (1, 8, 3, 4), (6, 5, 11, 10))[: data.draw(st.integers(1, 3))]:
        sizes = data.draw(st.integers(0, tree.num_nodes)), data.draw(st.integers(0, 70))
        sequences.append(Sequence(*sizes, first, blocks))
        first = rows_of(sequences[-1]).stop
    heads = KV_HEADS * data.draw(st.integers(1, 4))
    step = Step.make(layout, sequences, own=own, heads=heads)
    window = data.draw(st.none() | st.integers(1, 100))
    output = step.attend(step.tree_rows(tree, sequences), window=window)
    assert is_within_tolerance(output, step.reference(tree, sequences, window=window))


@every_layout
def test_rows_outside_the_trees_are_left_alone(layout, own):
    step = Step.make(layout, own=own)
    output = step.attend(step.tree_rows(BUSH))
    outside = torch.ones(len(output), dtype=torch.bool)
    for sequence in STEP:
        outside[rows_of(sequence)] = False
    assert outside.sum() == 4
    assert output[outside].eq(UNTOUCHED).all()


@every_layout
def test_a_tree_alone_is_attended_to_as_in_a_batch(layout, own):
    step = Step.make(layout, own=own)
    together = step.attend(step.tree_rows(BUSH))
    for index, sequence in enumerate(STEP):
        alone = replace(step, block_table=step.block_table[index : index + 1])
        output = alone.attend(alone.tree_rows(BUSH, [sequence]))
        rows = rows_of(sequence)
        assert is_within_tolerance(output[rows], together[rows])


@every_layout
def test_each_request_may_have_a_tree_of_its_own(layout, own):
    step = Step.make(layout, own=own)
    width = BUSH.num_nodes + 1
    chain = torch.arange(-1, width - 1).clamp(min=0)
    star = torch.zeros(width, dtype=torch.int64)
    parents = torch.stack([(BUSH.parents, chain, star)[i % 3] for i in range(len(STEP))])
    trees = Trees.from_parents(parents)
    together = step.attend(replace(step.tree_rows(BUSH), trees=trees))
    for index, sequence in enumerate(STEP):
        alone = replace(step, block_table=step.block_table[index : index + 1])
        nodes = [(int(parent), row) for row, parent in enumerate(parents[index, 1:])]
        output = alone.attend(alone.tree_rows(TreeTemplate(tuple(nodes)), [sequence]))
        rows = rows_of(sequence)
        assert is_within_tolerance(output[rows], together[rows])


LOOKAHEAD = lookahead_template(window=20, levels=5, guesses=20, length=6)
# Each node below one of the eight before it: deep, and wide.
LARGEST = TreeTemplate(tuple((max(0, node - node * 5 % 8), node % 8) for node in range(MAX_NODES)))


@every_layout
@pytest.mark.parametrize("tree", [LOOKAHEAD, LARGEST], ids=["lookahead", "largest"])
def test_large_trees_and_bare_roots_equal_a_softmax_over_context_and_ancestors(layout, own, tree):
    sequences = [
        Sequence(num_nodes=tree.num_nodes, num_context=64, first=2, blocks=tuple(range(10, 21))),
        Sequence(num_nodes=0, num_context=33, first=1, blocks=(9, 2)),
        Sequence(num_nodes=0, num_context=0, first=0, blocks=(3,)),
        Sequence(num_nodes=130, num_context=1, first=270, blocks=(8, 1, 0, 7, 4)),
    ]
    step = Step.make(layout, sequences, own=own)
    output = step.attend(step.tree_rows(tree, sequences))
    assert is_within_tolerance(output, step.reference(tree, sequences))


@every_layout
def test_own_keys_and_values_give_what_cached_ones_give(layout):
    cached, own = Step.make(layout), Step.make(layout, own=True)
    expected = cached.attend(cached.tree_rows(BUSH))
    assert is_within_tolerance(own.attend(own.tree_rows(BUSH)), expected)
    own.own[1][STEP[0].first] += 1
    assert not is_within_tolerance(own.attend(own.tree_rows(BUSH)), expected)


@every_layout
@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
def test_what_is_given_for_a_row_is_seen_by_it_and_its_descendants_alone(layout, side):
    step = Step.make(layout, own=True)
    before = step.attend(step.tree_rows(BUSH))
    for row in (0, 1, 9, 25):
        other = Step.make(layout, own=True)
        other.own[side][STEP[0].first + row] = 3.0
        changed = (before != other.attend(other.tree_rows(BUSH))).flatten(1).any(dim=1)
        assert changed[rows_of(STEP[0])].tolist() == BUSH.ancestor_mask[:, row].tolist()
        changed[rows_of(STEP[0])] = False
        assert not changed.any()


@every_layout
def test_a_context_is_read_from_the_cache(layout):
    step = Step.make(layout, own=True)
    step.kv_cache.fill_(float("nan"))
    output = step.attend(step.tree_rows(BUSH))
    for sequence in STEP:
        is_nan = output[rows_of(sequence)].isnan()
        assert is_nan.all() if sequence.num_context else not is_nan.any()


# Rows 1 and 2 are children of the root, and in all trees. One of these has no context, so that a
# wrong key has a weight that rounding cannot hide.
WRONG_MASKS = {"hidden ancestor": (2, 0, False), "shown sibling": (2, 1, True)}


@every_layout
@pytest.mark.parametrize(("row", "key", "shown"), WRONG_MASKS.values(), ids=WRONG_MASKS)
def test_a_mask_that_is_wrong_in_one_place_is_seen(layout, own, row, key, shown):
    step = Step.make(layout, own=own)
    wrong = TreeTemplate(BUSH.nodes)
    assert wrong.ancestor_mask[row, key] != shown
    wrong.ancestor_mask[row, key] = shown
    output, reference = step.attend(step.tree_rows(wrong)), step.reference(BUSH)
    assert not is_within_tolerance(output, reference)
    for sequence in STEP:
        output[sequence.first + row] = reference[sequence.first + row].to(output.dtype)
    assert is_within_tolerance(output, reference)


@every_layout
def test_a_tree_that_is_a_chain_equals_the_causal_kernel_of_vllm(layout, own):
    step = Step.make(layout, own=own)
    chain = TreeTemplate(tuple((row, 0) for row in range(25)))
    causal = causal_attention(Step.make(layout), STEP)
    for tree, equal in ((chain, True), (BUSH, False)):
        output = step.attend(step.tree_rows(tree))
        rows = torch.cat([output[rows_of(sequence)] for sequence in STEP])
        assert is_within_tolerance(rows, causal) == equal


# Of less than a path of the tree, of a context's end, of parts of blocks and whole ones, and longer
# than all of them.
WINDOWS = [1, 3, 20, 33, 64, 200]


@every_layout
@pytest.mark.parametrize("window", WINDOWS)
def test_rows_see_what_is_in_the_window_up_to_their_own_position(layout, own, window):
    step = Step.make(layout, own=own)
    output = step.attend(step.tree_rows(BUSH), window=window)
    assert is_within_tolerance(output, step.reference(BUSH, window=window))
    if window < 64:
        assert not is_within_tolerance(output, step.reference(BUSH, window=window + 1))


@every_layout
@pytest.mark.parametrize("window", WINDOWS)
def test_a_chain_with_a_window_equals_the_causal_kernel_of_vllm(layout, own, window):
    step = Step.make(layout, own=own)
    chain = TreeTemplate(tuple((row, 0) for row in range(25)))
    causal = causal_attention(Step.make(layout), STEP, window=window)
    output = step.attend(step.tree_rows(chain), window=window)
    rows = torch.cat([output[rows_of(sequence)] for sequence in STEP])
    assert is_within_tolerance(rows, causal)


@every_layout
def test_blocks_that_fell_out_of_the_window_are_others(layout, own):
    """vLLM gives them away; what it leaves in the block table is theirs by now."""
    sequence = Sequence(num_nodes=25, num_context=200, first=0, blocks=(9, 6, 1, 0, 8, 2, 3, 4))
    window = 40
    step = Step.make(layout, [sequence], own=own)
    trees = step.tree_rows(BUSH, [sequence])
    expected = step.attend(trees, window=window)
    passed = (sequence.num_context + 1 - window) // layout.block_size
    assert passed
    step.kv_cache[list(sequence.blocks[:passed])] = STALE
    assert step.attend(trees, window=window).equal(expected)
    assert is_within_tolerance(expected, step.reference(BUSH, [sequence], window=window))
    assert not is_within_tolerance(step.attend(trees), expected)


@every_layout
@pytest.mark.parametrize("window", [None, 20])
def test_a_sink_is_a_score_of_each_head(layout, own, window):
    step = Step.make(layout, own=own)
    trees = step.tree_rows(BUSH)
    output = step.attend(trees, window=window, sinks=SINKS)
    assert is_within_tolerance(output, step.reference(BUSH, window=window, sinks=SINKS))
    for others in (None, SINKS.roll(1)):
        reference = step.reference(BUSH, window=window, sinks=others)
        assert not is_within_tolerance(output, reference)


@every_layout
def test_a_sink_of_no_weight_is_none(layout, own):
    step = Step.make(layout, own=own)
    trees, none = step.tree_rows(BUSH), torch.full_like(SINKS, float("-inf"))
    output = step.attend(trees, sinks=none)
    assert is_within_tolerance(output, step.attend(trees))


@every_layout
@pytest.mark.parametrize("window", [-1, 20])
def test_a_chain_with_sinks_equals_the_causal_kernel_of_vllm(layout, own, window):
    step = Step.make(layout, own=own)
    chain = TreeTemplate(tuple((row, 0) for row in range(25)))
    sinks = SINKS.to(torch.bfloat16 if layout.dtype == torch.bfloat16 else torch.float32)
    causal = causal_attention(Step.make(layout), STEP, window=window, sinks=sinks)
    trees, shown = step.tree_rows(chain), None if window == -1 else window
    output = step.attend(trees, window=shown, sinks=sinks)
    rows = torch.cat([output[rows_of(sequence)] for sequence in STEP])
    assert is_within_tolerance(rows, causal)
