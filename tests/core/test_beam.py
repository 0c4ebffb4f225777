"""Growing level by level: the tree of a best-first search where the beam is wide enough."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from beam_settings import TOKENS, Setting, settings_of_growth
from dynamic_steps import K, make_rows, texts_of_rows
from hypothesis import given
from strategies import BRIEF, THOROUGH

from vllm_recycle.core.adjacency import find_entry, write_entries
from vllm_recycle.core.grow import Growth, grow
from vllm_recycle.core.price import StepTimes

# Of the settings below: rows of a level, so that all of them are expanded, and levels.
ALL, MOST_LEVELS = K**4, 4


def worth_of(setting: Setting, b: int, growth: Growth) -> list[float]:
    """What the nodes of a request are worth, each from its parent's worth and its text."""
    rows, count = setting.rows, int(growth.num_nodes[b])
    tokens, parents = growth.token_ids[b, :count].tolist(), growth.trees.parents[b].tolist()
    texts, worth = texts_of_rows(setting.texts[b], parents, tokens), [1.0]
    for row, token in enumerate(tokens, start=1):
        context, salt = texts[parents[row]][::-1], int(rows.salts[b])
        found = find_entry(rows.table, context, salt, rows.layout)
        assert found is not None
        address, length, own = found
        head, *successors, _ = rows.table[address].tolist()
        rate = float(setting.rates[length, own, successors.index(token), head & 3])
        worth.append(worth[parents[row]] * rate)
    return worth[1:]


@THOROUGH
@given(setting=settings_of_growth())
def test_where_all_is_expanded_the_tree_is_that_of_a_best_first_search(setting):
    depths = [min(depth, MOST_LEVELS) for depth in setting.max_depths]
    setting = replace(setting, max_depths=depths, beam=ALL, levels=MOST_LEVELS)
    times, slopes = StepTimes.linear(0.0, 200).at(1, 0)
    free = {"times": times, "slopes": slopes, "num_other_rows": 0}
    best_first = grow(setting.rows.table, setting.rates.double(), **setting.arguments, **free)
    growth, worth = setting.grow()
    assert growth.num_nodes.equal(best_first.num_nodes)
    for b, count in enumerate(growth.num_nodes.tolist()):
        # Of nodes that are worth the same either way may take another.
        assert worth[b, :count].tolist() == worth_of(setting, b, best_first)


@THOROUGH
@given(setting=settings_of_growth())
def test_nodes_are_a_tree_within_its_limits_and_worth_what_is_said(setting):
    growth, worth = setting.grow()
    trees = growth.trees
    assert worth.dtype == torch.float32
    assert trees.num_nodes == setting.max_nodes
    for b, count in enumerate(growth.num_nodes.tolist()):
        assert worth[b, :count].tolist() == worth_of(setting, b, growth)
        assert not worth[b, count:].any()
        assert (worth[b].diff() <= 0).all()
        assert growth.token_ids[b, count:].tolist() == [-1] * (setting.max_nodes - count)
        parents = trees.parents[b, 1 : count + 1].tolist()
        assert all(parent < row for row, parent in enumerate(parents, start=1))
        assert not trees.parents[b, count + 1 :].any()
        assert len({*zip(parents, growth.token_ids[b].tolist(), strict=False)}) == count
        depths = trees.depths[b, : count + 1]
        assert depths.max() <= min(setting.levels, setting.max_depths[b])
        # Of each level no more rows than the beam have nodes below them.
        inner = {parent: int(depths[parent]) for parent in parents}
        assert all([*inner.values()].count(level) <= setting.beam for level in range(6))


@BRIEF
@given(setting=settings_of_growth())
def test_fewer_nodes_are_a_prefix_of_more(setting):
    growth, worth = setting.grow()
    for count in range(1, setting.max_nodes):
        smaller, its_worth = replace(setting, max_nodes=count).grow()
        assert smaller.token_ids.equal(growth.token_ids[:, :count])
        assert smaller.trees.parents.equal(growth.trees.parents[:, : count + 1])
        assert its_worth.equal(worth[:, :count])


@pytest.mark.parametrize(("beam", "levels", "count"), [(1, 3, 3), (2, 3, 4), (2, 1, 2)])
def test_of_a_level_the_best_rows_are_expanded(beam, levels, count):
    rows = make_rows("shared", vocab_size=TOKENS, contexts=(1,))
    for token, successors in ((0, [1, 2, -1]), (1, [3, -1, -1]), (2, [0, -1, -1])):
        write_entries(rows.table, [token], 1, successors, rows.layout, own=False, shared=True)
    rates = torch.tensor([0.5, 0.25, 0.125])[:, None].expand(1, 2, K, 4)
    growth, worth = Setting(rows, rates, [[0]], [2], 5, beam, levels).grow()
    padding = 5 - count
    assert growth.trees.parents[0].tolist() == [0, 0, 0, 1, 2][: count + 1] + [0] * padding
    assert growth.token_ids[0].tolist() == [1, 2, 3, 0][:count] + [-1] * padding
    assert worth[0].tolist() == [0.5, 0.25, 0.25, 0.125][:count] + [0] * padding
