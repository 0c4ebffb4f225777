"""Tree attention on CPU: against a double-precision softmax; `test_bits` compares it with vLLM's.

All layouts are tried here; bits are compared only where ours are rounded as vLLM's are.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_layouts import LAYOUTS, STALE, every_layout, skip_reason
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import LARGEST, trees
from tolerance import is_within_tolerance
from tree_steps import BUSH, UNTOUCHED, Step, bushes, sinks_of, softmax_rows, texts_of

from vllm_recycle.core.lookahead import lookahead_template


@pytest.fixture(params=[False, True], ids=["cached", "own"])
def own(request) -> bool:
    """Whether the keys and values of the rows are given, instead of cached."""
    return request.param


@settings(max_examples=60, deadline=None)
@given(data=st.data(), own=st.booleans())
def test_any_trees_equal_a_softmax_over_context_and_ancestors(data, own):
    layouts = [layout for layout in LAYOUTS if not skip_reason(layout.isa)]
    layout = data.draw(st.sampled_from(layouts))
    layout = replace(layout, heads=layout.kv_heads * data.draw(st.integers(1, 4)))
    sizes = []
    for _ in range(data.draw(st.integers(1, 3))):
        parents = data.draw(trees()).parents.tolist()
        rows = data.draw(st.integers(1, len(parents)))
        sizes.append((data.draw(st.integers(0, 70)), parents[:rows]))
    texts, window = texts_of(layout, *sizes), data.draw(st.none() | st.integers(1, 100))
    step = Step.make(layout, texts, own=own)
    output = step.tree_rows(step.attend(window=window))
    assert is_within_tolerance(output, softmax_rows(texts, window=window))


@every_layout
def test_rows_outside_the_trees_are_left_alone(layout, own):
    texts = bushes(layout)
    step = Step.make(layout, texts, own=own)
    output = step.attend()
    assert is_within_tolerance(step.tree_rows(output), softmax_rows(texts))
    outside = torch.ones(len(output), dtype=torch.bool)
    for index in range(len(texts)):
        outside[step.rows_of(index)] = False
    assert outside.sum() == 4
    assert output[outside].eq(UNTOUCHED).all()


LOOKAHEAD = lookahead_template(window=20, levels=5, guesses=20, length=6)


@every_layout
@pytest.mark.parametrize("tree", [LOOKAHEAD, LARGEST], ids=["lookahead", "largest"])
def test_large_trees_and_bare_roots_equal_a_softmax_over_context_and_ancestors(layout, own, tree):
    parents = tree.parents.tolist()
    texts = texts_of(layout, (64, parents), (33, [0]), (0, [0]), (1, parents[:131]))
    step = Step.make(layout, texts, own=own)
    assert is_within_tolerance(step.tree_rows(step.attend()), softmax_rows(texts))


@every_layout
@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
def test_what_is_given_for_a_row_is_seen_by_it_and_its_descendants_alone(layout, side):
    step = Step.make(layout, bushes(layout), own=True)
    before, tree = step.attend(), step.rows_of(0)
    for row in (0, 1, 9, 25):
        of_row = step.own[side][tree.start + row]
        kept = of_row.clone()
        of_row.fill_(3.0)
        changed = (before != step.attend()).flatten(1).any(dim=1)
        of_row.copy_(kept)
        assert changed[tree].tolist() == BUSH.ancestor_mask[:, row].tolist()
        changed[tree] = False
        assert not changed.any()


@every_layout
def test_a_context_is_read_from_the_cache(layout):
    texts = bushes(layout)
    step = Step.make(layout, texts, own=True)
    step.kv_cache.fill_(float("nan"))
    output = step.attend()
    for index, text in enumerate(texts):
        is_nan = output[step.rows_of(index)].isnan()
        assert is_nan.all() if text.context else not is_nan.any()


# Less than a path of the tree, less than a context, parts of blocks, and longer than all of them.
@every_layout
@pytest.mark.parametrize("window", [1, 3, 20, 33, 64, 200])
def test_rows_see_what_is_in_the_window_up_to_their_own_position(layout, own, window):
    texts = bushes(layout)
    step = Step.make(layout, texts, own=own)
    output = step.tree_rows(step.attend(window=window))
    assert is_within_tolerance(output, softmax_rows(texts, window=window))
    if window < 64:
        assert not is_within_tolerance(output, softmax_rows(texts, window=window + 1))


@every_layout
def test_blocks_that_fell_out_of_the_window_are_others(layout, own):
    """vLLM gives them away; what it leaves in the block table is theirs by now."""
    texts, window = texts_of(layout, (200, BUSH.parents.tolist())), 40
    step = Step.make(layout, texts, own=own)
    expected = step.attend(window=window)
    passed = (200 + 1 - window) // layout.block_size
    assert passed
    step.kv_cache[step.queries.block_table[0, :passed].long()] = STALE
    assert step.attend(window=window).equal(expected)
    assert is_within_tolerance(step.tree_rows(expected), softmax_rows(texts, window=window))
    assert not is_within_tolerance(step.attend(), expected)


@every_layout
@pytest.mark.parametrize("window", [None, 20])
def test_a_sink_is_a_score_of_each_head(layout, own, window):
    texts, sinks = bushes(layout), sinks_of(layout)
    step = Step.make(layout, texts, own=own)
    output = step.tree_rows(step.attend(window=window, sinks=sinks))
    assert is_within_tolerance(output, softmax_rows(texts, window=window, sinks=sinks))
    for others in (None, sinks.roll(1)):
        assert not is_within_tolerance(output, softmax_rows(texts, window=window, sinks=others))


@every_layout
def test_a_sink_of_no_weight_is_none(layout, own):
    step = Step.make(layout, bushes(layout), own=own)
    none = torch.full_like(sinks_of(layout), float("-inf"))
    assert is_within_tolerance(step.attend(sinks=none), step.attend())
