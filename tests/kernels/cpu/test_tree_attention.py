"""Tree attention on CPU: against a double-precision softmax; `test_bits` compares it with vLLM's.

All layouts are tried here; bits are compared only where ours are rounded as vLLM's are.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.strategies import LARGEST, trees
from tests.kernels.cpu.cache_layouts import LAYOUTS, STALE, every_layout, skip_reason
from tests.kernels.cpu.tree_steps import BUSH, Step, bushes, sinks_of, softmax_rows, texts_of
from tests.kernels.triton.attention_steps import UNTOUCHED, assert_close
from vllm_recycle.core.paper.draft_shape import DraftShape


@pytest.fixture(params=[False, True], ids=["cached", "own"])
def own(request) -> bool:
    """Whether the keys and values of the rows are given, instead of cached."""
    return request.param


@settings(max_examples=100, deadline=None)
@given(data=st.data(), own=st.booleans(), has_sinks=st.booleans())
def test_any_trees_equal_a_softmax_over_context_and_ancestors(data, own, has_sinks):
    """With a window up to their own position, and a sink that is a score of each head."""
    layouts = [layout for layout in LAYOUTS if not skip_reason(layout.isa)]
    layout = data.draw(st.sampled_from(layouts))
    layout = replace(layout, heads=layout.kv_heads * data.draw(st.integers(1, 4)))
    sizes = []
    for _ in range(data.draw(st.integers(1, 3))):
        parents = data.draw(trees()).parents.tolist()
        rows = data.draw(st.integers(1, len(parents)))
        sizes.append((data.draw(st.integers(0, 70)), parents[:rows]))
    texts, window = texts_of(layout, *sizes), data.draw(st.none() | st.integers(1, 100))
    check(layout, texts, own=own, window=window, sinks=sinks_of(layout) if has_sinks else None)


def check(layout, texts, *, own, **given) -> None:
    step = Step.make(layout, texts, own=own)
    output = step.attend(**given)
    assert_close(step.tree_rows(output), softmax_rows(texts, **given))
    # Rows of no tree are left alone.
    outside = torch.ones(len(output), dtype=torch.bool)
    for index in range(len(texts)):
        outside[step.rows_of(index)] = False
    assert outside.sum() == 1 + len(texts)
    assert output[outside].eq(UNTOUCHED).all()


# Less than a path of the tree, less than a context, parts of blocks, and longer than all of them.
@every_layout
@pytest.mark.parametrize("window", [None, 1, 3, 20, 33, 64, 200])
def test_rows_equal_a_softmax_over_what_they_see(layout, own, window):
    sinks = sinks_of(layout) if window in (None, 20) else None
    check(layout, bushes(layout), own=own, window=window, sinks=sinks)


# The sizes of the paper.
LOOKAHEAD = DraftShape(12, 20, 20, 7, 3).lookahead()


@every_layout
@pytest.mark.parametrize("tree", [LOOKAHEAD, LARGEST], ids=["lookahead", "largest"])
def test_large_trees_and_bare_roots_equal_a_softmax_over_context_and_ancestors(layout, own, tree):
    parents = tree.parents.tolist()
    texts = texts_of(layout, (64, parents), (33, [0]), (0, [0]), (1, parents[:131]))
    check(layout, texts, own=own)


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
def test_blocks_that_fell_out_of_the_window_are_others(layout, own):
    """vLLM gives them away; what it leaves in the block table is theirs by now."""
    texts, window = texts_of(layout, (200, BUSH.parents.tolist())), 40
    step = Step.make(layout, texts, own=own)
    expected = step.attend(window=window)
    passed = (200 + 1 - window) // layout.block_size
    assert passed
    step.kv_cache[step.queries.block_table[0, :passed].long()] = STALE
    assert step.attend(window=window).equal(expected)
    assert_close(step.tree_rows(expected), softmax_rows(texts, window=window))
