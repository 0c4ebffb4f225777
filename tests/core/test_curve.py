"""The seconds of steps: between measured points or by graphs, and as served steps correct them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vllm_recycle.core.curve import CHAINS, MOST, TAKE_IN_EVERY, TREES, TRUNKS, Load, MeasuredCurve
from vllm_recycle.core.graph_curve import GraphCurve, GraphShape, GraphTimes

KINDS = (TREES, CHAINS)


def curve(points: dict[tuple[int, int], dict[int, float]], max_rows: int) -> MeasuredCurve:
    return MeasuredCurve(dict.fromkeys(KINDS, points), max_rows)


def by_rows(of: MeasuredCurve, requests: int = 1, context: float = 0, kind: str = TREES):
    return of.by_rows(kind, Load(requests, context)).tolist()


def test_linear_times_are_in_units_of_one_row():
    of = MeasuredCurve.linear(0.25, 6, KINDS)
    assert by_rows(of)[1:] == [1, 1.25, 1.5, 1.75, 2, 2.25]
    # At any load.
    assert by_rows(of, 3, 500) == by_rows(of)


def test_between_and_beyond_what_was_measured_times_lie_on_lines():
    points = {(2, 0): {2: 5.0, 4: 5.0}, (1, 0): {1: 2.0, 3: 4.0, 5: 3.0, 9: 6.0}}
    of = curve(points, 11)
    # Five rows took less than three: noise, so both took what is between them.
    expected = [2, 2, 2.75, 3.5, 3.5, 3.5, 4.125, 4.75, 5.375, 6, 6.625, 7.25]
    assert by_rows(of) == expected
    assert by_rows(of, 2) == [5] * 12
    assert by_rows(curve(points, 2)) == expected[:3]


def test_two_noisy_times_do_not_make_what_is_beyond_free():
    seconds = by_rows(curve({(1, 0): {1: 1.0, 48: 3.0, 81: 2.9}}, 200))
    assert (np.diff(seconds[81:]) > 0.01).all()
    assert seconds[200] > 4


def test_the_nearest_number_of_requests_comes_before_the_nearest_context():
    loads = {(1, 0): 1.0, (4, 1000): 2.0, (4, 50): 3.0, (16, 0): 4.0}
    of = curve({(n, at): {n: one, n + 1: one} for (n, at), one in loads.items()}, 600)
    asked = [(1, 9), (2, 9), (3, 9), (3, 900), (7, 0), (9, 0), (500, 999)]
    assert [of.plain(Load(*load)) for load in asked] == [1, 1, 3, 2, 3, 4, 4]


def test_a_row_costs_what_it_does_behind_as_many_rows_of_drafts():
    # Of four requests: a plain step takes 1, and each row of a draft a half.
    of = curve({(4, 0): {4: 1.0, 5: 1.5, 8: 3.0}}, 12)
    for requests in (2, 3, 4, 5, 7):
        assert by_rows(of, requests)[requests : requests + 5] == [1, 1.5, 2, 2.5, 3]


# Corrections.

ONE = Load(1, 256)
POINTS = {(1, 256): {1: 0.01, 9: 0.02}, (8, 512): {8: 0.02, 72: 0.1}}


def serve(of: MeasuredCurve, seconds: float, *, rows=1, kind=None, load=ONE, times=6) -> None:
    for _ in range(times * TAKE_IN_EVERY):
        of.serve(kind, load, rows, seconds)


def test_served_steps_correct_their_load_and_kind_alone():
    of = curve(POINTS, 72)
    serve(of, 0.04, rows=8, kind=CHAINS)
    serve(of, 0.01)
    assert by_rows(of, 1, 256, CHAINS)[8] == pytest.approx(0.04, rel=0.01)
    assert by_rows(of, 1, 256, CHAINS)[1] == pytest.approx(0.01, rel=0.01)
    before = curve(POINTS, 72)
    assert by_rows(of, 1, 256, TREES) == pytest.approx(by_rows(before, 1, 256, TREES), rel=0.01)
    assert by_rows(of, 8, 512, CHAINS) == by_rows(before, 8, 512, CHAINS)
    where = "seconds_by_measured: chains, 1 requests, 256 tokens, 8 rows"
    assert of.known()[where] == pytest.approx(0.04 / by_rows(before, 1, 256)[8], rel=0.01)


def test_without_drafts_all_kinds_are_one():
    of = curve(POINTS, 72)
    serve(of, 0.02)
    for kind in KINDS:
        assert by_rows(of, 1, 256, kind)[1] == pytest.approx(0.02, rel=0.01)


def test_what_plain_steps_take_at_first_lengthens_drafts_too():
    of = curve(POINTS, 72)
    of.set_plain(ONE, 0.02)
    for kind in KINDS:
        assert by_rows(of, 1, 256, kind)[1:10:8] == pytest.approx([0.02, 0.04])
    of.set_plain(ONE, 0.01)
    assert by_rows(of, 1, 256)[1:10:8] == pytest.approx([0.01, 0.04])


def test_other_rows_share_a_correction_and_forget_that_they_were_slow():
    of, before = curve(POINTS, 72), by_rows(curve(POINTS, 72), 1, 256)
    # While the machine is slow, many rows are served; then few, as ever.
    for rows, factor, steps in ((16, 1.25, 6), (4, 1.0, 6), (4, 1.0, 60)):
        serve(of, factor * before[rows], rows=rows, kind=TREES, times=steps)
        now = by_rows(of, 1, 256)
        found = [now[count] / before[count] for count in (4, 16)]
        if rows == 16:
            assert found == pytest.approx([1.12, 1.25], abs=0.02)
        else:
            assert found[0] == pytest.approx(1.0, abs=0.01)
            assert 1.0 < found[1] < (1.25 if steps == 6 else 1.03)


def test_a_stall_moves_little_and_a_shorter_time_may_be_believed_at_once():
    of = curve(POINTS, 72)
    for seconds in [0.01] * (TAKE_IN_EVERY - 1) + [10.0]:
        of.serve(None, ONE, 1, seconds)
    assert 0.01 < of.plain(ONE) < 0.01 * math.exp(MOST / 4)
    for place in range(TAKE_IN_EVERY):
        of.serve(None, ONE, 1, 0.005, is_look=place == 0)
    assert of.plain(ONE) == pytest.approx(0.005)
    of.set_plain(ONE, 0.007)
    assert of.plain(ONE) == pytest.approx(0.007)


def test_drafts_of_a_few_requests_do_not_move_the_time_of_plain_steps():
    of, load = curve(POINTS, 72), Load(8, 512)
    serve(of, 0.02, rows=8, load=load, times=1)
    plain = of.plain(load)
    serve(of, 0.2, rows=12, kind=TREES, load=load)
    assert of.plain(load) == plain
    # Nor those of batches that all draft by more than their own.
    few, all_of = (of.at(TREES, load, (rows,))[0] for rows in (16, 64))
    few /= curve(POINTS, 72).at(TREES, load, (16,))[0]
    all_of /= curve(POINTS, 72).at(TREES, load, (64,))[0]
    assert few > 2
    assert 0 < math.log(all_of) < math.log(few) / 3


# On a GPU a step takes as long as the graph that it gets.


def graph_curve(
    graphs: dict[tuple[int, int, int], tuple[float, float]],
    drafting: dict[str, dict[int, float]] | None = None,
) -> GraphCurve:
    shapes = {GraphShape(*shape): times for shape, times in graphs.items()}
    return GraphCurve(GraphTimes(shapes, drafting or {TREES: {8: 1.0}}))


def at(
    of: GraphCurve, nodes: int, requests: int, *, drafting: int = 0, context: float = 0, kind=TREES
) -> float:
    load = Load(requests, context, drafting)
    rows = requests + nodes * (drafting or requests)
    [seconds] = of.at(kind, load, (rows,))
    return seconds


def test_a_step_takes_as_long_as_the_next_larger_graph():
    of = graph_curve({(1, 1, 1): (5.0, 0.0), (4, 4, 1): (6.0, 0.5), (82, 6, 41): (7.0, 0.0)})
    assert at(of, 0, 1) == 5.0
    assert at(of, 0, 2) == at(of, 0, 4) == 6.0
    # Linear in the context.
    assert at(of, 0, 2, context=2) == 7.0
    assert at(of, 0, 2, context=20) == 16.0
    assert at(of, 40, 1) == 7.0 + 1.0
    # As many rows, of more requests; plain ones beside trees, and trees that are smaller.
    assert at(of, 20, 3) == at(of, 40, 6, drafting=1) == 7.0 + 1.0
    # No plain graph is left: that of trees has room.
    assert at(of, 0, 5) == 7.0
    # Of what has no graph nothing is known.
    assert at(of, 0, 7) == at(of, 82, 1) == at(of, 40, 7, drafting=1) == math.inf


def test_drafting_takes_what_the_next_larger_round_took():
    of = graph_curve({(99, 99, 99): (1.0, 0.0)}, {TREES: {1: 0.1, 4: 0.3, 8: 0.5}})
    seconds = [at(of, 1, 20, drafting=n) for n in (1, 2, 4, 5, 8, 9)]
    assert seconds == pytest.approx([1.1, 1.3, 1.3, 1.5, 1.5, 1.5])
    assert at(of, 0, 20) == 1.0
    of = graph_curve({(99, 99, 99): (1.0, 0.0)}, {TRUNKS: {1: 0.5}, TREES: {20: 0.25}})
    assert [at(of, n, 2) for n in (0, 1)] == [1.0, 1.25]
    assert at(of, 1, 2, kind=TRUNKS) == 1.5


def test_a_head_that_reads_each_step_lengthens_plain_ones():
    times = GraphTimes({GraphShape(99, 99, 99): (1.0, 0.0)}, {TREES: {8: 0.5}}, {1: 0.1, 8: 0.2})
    assert [at(GraphCurve(times), 0, n) for n in (1, 2)] == [1.1, 1.2]
    assert at(GraphCurve(times), 1, 2) == 1.5


def test_served_steps_correct_graphs():
    of, load = graph_curve({(1, 1, 1): (5.0, 0.0), (8, 1, 8): (6.0, 0.0)}), Load(1)
    for _ in range(96):
        of.serve(TREES, load, 8, 14.0)
        of.serve(None, load, 1, 5.0)
    assert of.at(TREES, load, (1, 8)) == pytest.approx([5.0, 14.0], rel=0.01)
    assert at(of, 80, 1) == math.inf
