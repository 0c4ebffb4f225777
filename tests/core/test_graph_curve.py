"""The seconds of steps on a GPU: those of the graph that a step gets."""

from __future__ import annotations

import math

import pytest

from vllm_recycle.core.curve import TREES, TRUNKS, Load
from vllm_recycle.core.graph_curve import GraphCurve, GraphShape, GraphTimes


def curve(
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
    of = curve({(1, 1, 1): (5.0, 0.0), (4, 4, 1): (6.0, 0.5), (82, 6, 41): (7.0, 0.0)})
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
    of = curve({(99, 99, 99): (1.0, 0.0)}, {TREES: {1: 0.1, 4: 0.3, 8: 0.5}})
    seconds = [at(of, 1, 20, drafting=n) for n in (1, 2, 4, 5, 8, 9)]
    assert seconds == pytest.approx([1.1, 1.3, 1.3, 1.5, 1.5, 1.5])
    assert at(of, 0, 20) == 1.0
    of = curve({(99, 99, 99): (1.0, 0.0)}, {TRUNKS: {1: 0.5}, TREES: {20: 0.25}})
    assert [at(of, n, 2) for n in (0, 1)] == [1.0, 1.25]
    assert at(of, 1, 2, kind=TRUNKS) == 1.5


def test_a_head_that_reads_each_step_lengthens_plain_ones():
    times = GraphTimes({GraphShape(99, 99, 99): (1.0, 0.0)}, {TREES: {8: 0.5}}, {1: 0.1, 8: 0.2})
    assert [at(GraphCurve(times), 0, n) for n in (1, 2)] == [1.1, 1.2]
    assert at(GraphCurve(times), 1, 2) == 1.5


def test_served_steps_correct_graphs():
    of, load = curve({(1, 1, 1): (5.0, 0.0), (8, 1, 8): (6.0, 0.0)}), Load(1)
    for _ in range(96):
        of.serve(TREES, load, 8, 14.0)
        of.serve(None, load, 1, 5.0)
    assert of.at(TREES, load, (1, 8)) == pytest.approx([5.0, 14.0], rel=0.01)
    assert at(of, 80, 1) == math.inf
