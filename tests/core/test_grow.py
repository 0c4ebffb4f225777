"""Growing trees: against a search without a heap, and what rows cost."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from dynamic_steps import VOCAB, K, make_rows, tails_of
from hypothesis import given
from hypothesis import strategies as st
from strategies import BRIEF, THOROUGH

from vllm_recycle.core import SCOPES, Trees
from vllm_recycle.core.adjacency import AdjacencyMatrix, find_entry, write_entries
from vllm_recycle.core.grow import Growth, grow
from vllm_recycle.core.price import StepTimes

TOKENS = 4


@dataclass
class Setting:
    """What a tree is grown from."""

    rows: AdjacencyMatrix
    rates: torch.Tensor
    texts: list[list[int]]
    max_depths: list[int]
    step_times: StepTimes
    num_other_rows: int
    max_nodes: int

    def grow(self) -> Growth:
        times, slopes = self.step_times.at(1, 0)
        return grow(
            self.rows.table,
            self.rates,
            layout=self.rows.layout,
            salts=self.rows.salts[: len(self.texts)],
            tails=tails_of(self.texts, self.rows.layout.reach),
            max_depths=torch.tensor(self.max_depths),
            times=times,
            slopes=slopes,
            num_other_rows=self.num_other_rows,
            max_nodes=self.max_nodes,
        )


@st.composite
def step_times(draw) -> StepTimes:
    """Never falling, of whole numbers: now a row costs much, and now nothing."""
    rises = st.sampled_from([0, 0, 0, 1, 1, 2, 5])
    times = [draw(st.integers(1, 6))]
    for rise in draw(st.lists(rises, min_size=1, max_size=16)):
        times.append(times[-1] + rise)
    return StepTimes({(1, 0): times})


@st.composite
def settings_of_growth(draw) -> Setting:
    """Rows, rates that are eighths, so that sums are exact and often equal, and one to three texts.

    Sums and products of these are exact, and quotients are compared as they are.
    """
    batch = draw(st.integers(1, 3))
    rows = make_rows(
        draw(st.sampled_from(SCOPES)), vocab_size=TOKENS, slots=draw(st.sampled_from([2, 64]))
    )
    for b in range(3):
        rows.begin(b)
    token = st.integers(0, TOKENS - 1)
    some = st.lists(token, max_size=K, unique=True)
    written = st.tuples(st.integers(1, 3), st.tuples(token, token), some, st.integers(1, 4))
    for salt, context, successors, times in draw(st.lists(written, max_size=10)):
        successors = [*successors, *[-1] * K][:K]
        for _ in range(times):
            write_entries(rows.table, context, salt, successors, rows.layout, own=True, shared=True)
    shape = (2, 2, K, 4)
    eighths = st.lists(st.integers(0, 8), min_size=48, max_size=48)
    return Setting(
        rows=rows,
        rates=torch.tensor(draw(eighths), dtype=torch.float64).view(shape) / 8,
        texts=draw(
            st.lists(st.lists(token, min_size=1, max_size=3), min_size=batch, max_size=batch)
        ),
        max_depths=draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch)),
        step_times=draw(step_times()),
        num_other_rows=draw(st.integers(0, 3)),
        max_nodes=draw(st.integers(1, 8)),
    )


@dataclass
class Candidate:
    request: int
    parent: int
    text: list[int]
    depth: int
    worth: float


def best_first(setting: Setting, most: int) -> list[Candidate]:
    """Up to `most` nodes: of all that could be added, always the one that is worth the most."""
    rows, added = setting.rows, []
    sizes = [0] * len(setting.texts)
    candidates: list[Candidate] = []

    def offer(above: Candidate, row: int) -> None:
        if above.depth == setting.max_depths[above.request]:
            return
        context, salt = above.text[::-1], int(rows.salts[above.request])
        found = find_entry(rows.table, context, salt, rows.layout)
        if found is None:
            return
        address, length, own = found
        head, *successors, _ = rows.table[address].tolist()
        for rank, token in enumerate(successors):
            if token != -1:
                worth = above.worth * setting.rates[length, own, rank, head % 4].item()
                text = [*above.text, token]
                candidates.append(Candidate(above.request, row, text, above.depth + 1, worth))

    for request, text in enumerate(setting.texts):
        offer(Candidate(request, 0, text, 0, 1.0), 0)
    while len(added) < most:
        allowed = [c for c in candidates if sizes[c.request] < setting.max_nodes]
        if not allowed:
            break
        best = max(allowed, key=lambda candidate: candidate.worth)  # the first one of equals
        candidates = [c for c in candidates if c is not best]
        added.append(best)
        sizes[best.request] += 1
        offer(best, sizes[best.request])
    return added


def grow_by_hand(setting: Setting) -> list[list[tuple[int, int]]]:
    """Of each request, parent and token of the nodes."""
    times = setting.step_times.times[0].tolist()
    first = setting.num_other_rows + len(setting.texts)
    added = best_first(setting, max(0, len(times) - 1 - first))
    gains = [
        (first + sum(candidate.worth for candidate in added[:count])) / times[first + count]
        for count in range(len(added) + 1)
        if first + count < len(times)
    ]
    kept = added[: gains.index(max(gains))] if gains else []
    return [
        [(c.parent, c.text[-1]) for c in kept if c.request == request]
        for request in range(len(setting.texts))
    ]


def nodes_of(growth: Growth) -> list[list[tuple[int, int]]]:
    return [
        list(zip(parents[1 : count + 1], tokens[:count], strict=True))
        for count, parents, tokens in zip(
            growth.num_nodes.tolist(),
            growth.trees.parents.tolist(),
            growth.token_ids.tolist(),
            strict=True,
        )
    ]


@THOROUGH
@given(setting=settings_of_growth())
def test_what_is_grown_is_the_best_prefix_of_a_best_first_search(setting):
    assert nodes_of(setting.grow()) == grow_by_hand(setting)


@THOROUGH
@given(setting=settings_of_growth())
def test_grown_trees_are_trees_within_their_limits(setting):
    growth = setting.grow()
    trees = growth.trees
    assert trees.num_nodes == setting.max_nodes
    for b, nodes in enumerate(nodes_of(growth)):
        assert len(nodes) <= setting.max_nodes
        assert len(set(nodes)) == len(nodes)  # siblings differ
        assert all(parent < row for row, (parent, _) in enumerate(nodes, start=1))
        assert trees.depths[b, : len(nodes) + 1].max() <= setting.max_depths[b]
        assert growth.token_ids[b, len(nodes) :].tolist() == [-1] * (setting.max_nodes - len(nodes))
        assert not trees.parents[b, len(nodes) + 1 :].any()
    first = setting.num_other_rows + len(setting.texts)
    total = first + int(growth.num_nodes.sum())
    assert total <= max(first, setting.step_times.max_rows)


@THOROUGH
@given(setting=settings_of_growth())
def test_a_prefix_of_a_grown_tree_is_a_tree(setting):
    trees = setting.grow().trees
    for rows in range(1, trees.num_nodes + 2):
        alone = Trees.from_parents(trees.parents[:, :rows])
        assert alone.depths.equal(trees.depths[:, :rows])
        assert alone.ancestor_mask.equal(trees.ancestor_mask[:, :rows, :rows])


def test_a_mask_has_the_ancestors_and_a_depth_counts_them():
    trees = Trees.from_parents(torch.tensor([[0, 0, 1, 1, 2], [0, 0, 0, 0, 0]]))
    assert trees.depths.tolist() == [[0, 1, 2, 2, 3], [0, 1, 1, 1, 1]]
    assert trees.ancestor_mask[0, 4].tolist() == [True, True, True, False, True]
    assert trees.ancestor_mask[1, 4].tolist() == [True, False, False, False, True]
    assert (trees.depth, trees.num_nodes) == (3, 4)
    second = trees.select(torch.tensor([1]))
    assert (second.depth, len(second.parents)) == (1, 1)


# What a row costs.


def known_chain(batch: int, step_times: StepTimes, **options) -> Setting:
    """Each token is known to be followed by the next one, half of the time."""
    rows = make_rows("shared", contexts=(1,))
    for token in range(VOCAB):
        successors = [(token + 1) % VOCAB, -1, -1]
        write_entries(rows.table, [token], 1, successors, rows.layout, own=False, shared=True)
    setting = {
        "rates": torch.full((1, 2, K, 4), 0.5, dtype=torch.float64),
        "texts": [[b] for b in range(batch)],
        "max_depths": [50] * batch,
        "num_other_rows": 0,
        "max_nodes": 6,
    }
    return Setting(rows=rows, step_times=step_times, **{**setting, **options})


@pytest.mark.parametrize(("row_cost", "expected"), [(0.0, 6), (0.1, 2), (0.3, 1), (0.6, 0)])
def test_the_dearer_a_row_the_fewer_nodes(row_cost, expected):
    growth = known_chain(1, StepTimes.linear(row_cost, 30)).grow()
    assert growth.num_nodes.tolist() == [expected]
    assert growth.token_ids.tolist() == [[1, 2, 3, 4, 5, 6][:expected] + [-1] * (6 - expected)]


def test_the_rows_of_a_step_are_shared_out_by_worth():
    setting = known_chain(2, StepTimes.linear(0.0, 6), num_other_rows=1)
    assert setting.grow().num_nodes.tolist() == [2, 1]
    setting.max_depths = [1, 50]
    assert setting.grow().num_nodes.tolist() == [1, 2]
    setting.rows.table[0] = -1  # nothing is known of the first one's token
    assert setting.grow().num_nodes.tolist() == [0, 3]


def test_where_others_fill_the_step_nothing_is_drafted():
    assert known_chain(2, StepTimes.linear(0.0, 6), num_other_rows=9).grow().num_nodes.sum() == 0


def test_nodes_below_a_dear_one_are_seen_where_rows_are_free_again():
    # The second row costs half a step, the ones after it nothing.
    setting = known_chain(1, StepTimes({(1, 0): [1, 1, 2, 2, 2, 2]}), max_nodes=5)
    setting.rates.fill_(0.75)
    assert setting.grow().num_nodes.tolist() == [4]


def test_of_equally_good_numbers_of_nodes_the_least_is_taken():
    # One row gives a token in 1, three rows 1.75 tokens in 1.75.
    setting = known_chain(1, StepTimes({(1, 0): [1, 1, 1.75, 1.75]}), max_nodes=2)
    assert setting.grow().num_nodes.tolist() == [0]


# Times.


@THOROUGH
@given(times=step_times())
def test_a_slope_is_the_least_to_any_larger_number_of_rows(times):
    values = times.times[0].tolist()
    for rows, slope in enumerate(times.slopes[0].tolist()):
        further = range(rows + 1, len(values))
        least = min(((values[b] - values[rows]) / (b - rows) for b in further), default=torch.inf)
        assert slope == least


@BRIEF
@given(values=st.lists(st.floats(0.1, 10), min_size=1, max_size=20))
def test_times_never_fall(values):
    times = StepTimes({(1, 0): values}).times[0].tolist()
    assert times == [max(values[: row + 1]) for row in range(len(values))]


def test_linear_times_are_in_units_of_one_row():
    times = StepTimes.linear(0.25, 4)
    assert times.max_rows == 4
    assert times.times.tolist() == [[1, 1, 1.25, 1.5, 1.75]]
    assert times.slopes.tolist() == [[0, 0.25, 0.25, 0.25, torch.inf]]


def test_between_and_beyond_what_was_measured_times_lie_on_lines():
    points = {(2, 0): {2: 5.0, 4: 5.0}, (1, 0): {1: 2.0, 3: 4.0, 5: 3.0, 9: 6.0}}
    times = StepTimes.measured(points, 11)
    assert times.loads == ((1, 0), (2, 0))
    # What five rows took is less than what three did: noise, so both took what is between them.
    expected = [1, 1, 1.375, 1.75, 1.75, 1.75, 2.0625, 2.375, 2.6875, 3, 3.3125, 3.625]
    assert times.times.tolist() == [expected, [1] * 12]
    assert StepTimes.measured(points, 2).times[0].tolist() == expected[:3]


def test_two_noisy_times_do_not_make_what_is_beyond_free():
    times = StepTimes.measured({(1, 0): {1: 1.0, 48: 3.0, 81: 2.9}}, 200)
    # Free between the two, at most.
    assert (times.slopes[0, 1:40] > 0.005).all()
    assert (times.slopes[0, 81:] > 0.01).all()
    assert float(times.times[0, 200]) > 4


def test_the_nearest_context_is_taken():
    times = StepTimes({(1, 1000): [3, 3], (1, 0): [1, 2], (1, 100): [2, 4]})
    first = [times.at(1, context)[0].tolist()[0] for context in (0, 40, 50.5, 400, 600, 10**6)]
    assert first == [1, 1, 2, 2, 3, 3]
    assert [float(times.at(1, context)[1][0]) for context in (0, 100, 1000)] == [1, 2, 0]


def test_the_nearest_number_of_requests_comes_before_the_nearest_context():
    times = StepTimes({(1, 0): [1] * 20, (4, 1000): [2] * 20, (4, 50): [3] * 20, (16, 0): [4] * 20})
    loads = [(1, 9), (2, 9), (3, 9), (3, 900), (7, 0), (9, 0), (500, 999)]
    assert [float(times.at(*load)[0][-1]) for load in loads] == [1, 1, 3, 2, 3, 4, 4]


def test_a_row_costs_what_it_does_behind_as_many_rows_of_drafts():
    # Of four requests: a plain step takes 1, and each row of a draft a half.
    times = StepTimes({(4, 0): [1, 1, 1, 1, 1, 1.5, 2, 2.5, 3]})
    for num_reqs in (2, 3, 4, 5, 7):
        of_drafts, slopes = (values[num_reqs:].tolist() for values in times.at(num_reqs, 0))
        assert of_drafts == [1, 1.5, 2, 2.5, 3]
        assert slopes == [0.5] * 4 + [torch.inf]


def test_a_given_cost_is_of_any_number_of_requests():
    times, _ = StepTimes.linear(0.25, 6).at(3, 500)
    assert times.tolist() == [1, 1, 1.25, 1.5, 1.75, 2, 2.25]


def test_times_of_each_are_those_of_all_where_all_have_as_many_rows():
    step_times = StepTimes.linear(0.25, 12)
    times, slopes = step_times.of_each(3, 0)
    assert times.tolist() == [1, 1.5, 2.25, 3, 3.75]
    assert slopes.tolist() == [0, 0.75, 0.75, 0.75, torch.inf]
    assert step_times.of_each(1, 0)[0].tolist() == step_times.at(1, 0)[0].tolist()
