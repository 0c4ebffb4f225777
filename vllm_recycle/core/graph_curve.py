"""The seconds of a step on a GPU: stairs, since a step takes what its captured graph takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vllm_recycle.core.curve import Curve, Load

# Rows of a request that a program of attention serves.
ROWS_OF_A_PROGRAM = 32


class GraphShape(NamedTuple):
    """What a step has, or what a graph has room for.

    Attributes:
        num_tokens: rows of all requests.
        num_reqs: requests.
        max_query_len: rows of the request that has most; 1 where nothing is drafted.

    """

    num_tokens: int
    num_reqs: int
    max_query_len: int

    @property
    def cost(self) -> int:
        """To compare graphs by: rows, and programs of attention.

        These are for the most rows of each request, and one that finds no row takes a step some
        third of the time that a row more takes, by counting.
        """
        return 3 * self.num_tokens + self.num_reqs * -(-self.max_query_len // ROWS_OF_A_PROGRAM)


def by_preference(
    shapes: Iterable[GraphShape], seconds: Mapping[GraphShape, float] | None = None
) -> list[GraphShape]:
    """Graphs in the order in which a step tries them: plain ones, then the cheaper first.

    Those of trees are compared by their `seconds`, where these were measured.
    """

    def rank(shape: GraphShape) -> tuple[bool, float, GraphShape]:
        is_tree = shape.max_query_len > 1
        return is_tree, seconds[shape] if seconds and is_tree else shape.cost, shape

    return sorted(shapes, key=rank)


@dataclass(frozen=True)
class GraphTimes:
    """What was measured at start-up, as it travels to the scheduler.

    Attributes:
        graphs: by graph, the seconds of its step behind no context, and the seconds more for each
            token of context that its requests have.
        drafting: by kind of drafts, seconds to draft by the most requests that this is for.
        plain: seconds of what runs behind a step that drafts nothing, as those of `drafting`.

    """

    graphs: Mapping[GraphShape, tuple[float, float]] = field(default_factory=dict)
    drafting: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    plain: Mapping[int, float] = field(default_factory=dict)

    @property
    def preference(self) -> list[GraphShape]:
        """The graphs, in the order in which steps are to try them."""
        return by_preference(self.graphs, {shape: time for shape, (time, _) in self.graphs.items()})


class GraphCurve(Curve):
    """A curve of graphs: a step takes what the first graph takes that has room for it.

    Args:
        times: of graphs, and of drafting.

    """

    def __init__(self, times: GraphTimes) -> None:
        super().__init__([*times.drafting])
        self.times, self._preference = times, times.preference
        self._graph_of: dict[GraphShape, GraphShape | None] = {}

    def cell(self, load: Load) -> int:
        return round(math.log2(load.requests))

    def measured(self, kind: str, load: Load, rows: np.ndarray) -> np.ndarray:
        return np.array([self._seconds(kind, load, int(count)) for count in rows])

    def _seconds(self, kind: str, load: Load, rows: int) -> float:
        drafting = load.drafting or load.requests
        nodes = -(-(rows - load.requests) // drafting)
        step = GraphShape(rows, load.requests, 1 + nodes)
        if step not in self._graph_of:
            graphs = (
                graph
                for graph in self._preference
                if all(room >= need for room, need in zip(graph, step, strict=True))
            )
            self._graph_of[step] = next(graphs, None)
        if (graph := self._graph_of[step]) is None:
            return math.inf
        seconds, per_token = self.times.graphs[graph]
        seconds += per_token * load.context
        # To draft for so many takes what it does for the next more that were timed, or the most.
        timed = self.times.drafting[kind] if nodes else self.times.plain
        batch = min((size for size in timed if size >= drafting), default=max(timed, default=None))
        return seconds if batch is None else seconds + timed[batch]

    def graph_sizes(self, requests: int, drafting: int) -> set[int]:
        """Nodes that so many of the requests can have in each graph; fewer there take as long."""
        return {
            min(graph.max_query_len - 1, (graph.num_tokens - requests) // drafting)
            for graph in self.times.graphs
            if graph.num_reqs >= requests
        }
