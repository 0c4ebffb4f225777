"""The time of a step by the size of its trees: measured where it was, else a scaled roofline.

`prices` has the times of a CPU, by rows and measured at several loads; here a step is one of
captured graphs, filled up to what the graph has room for.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from statistics import median
from typing import NamedTuple

from vllm_recycle.core.roofline import Device, ModelCosts


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


def by_preference(shapes: Iterable[GraphShape]) -> list[GraphShape]:
    """Graphs in the order in which a step tries them: plain ones, then the smaller first."""
    return sorted(
        shapes,
        key=lambda shape: (
            shape.max_query_len > 1,
            shape.num_tokens,
            shape.max_query_len,
            shape.num_reqs,
        ),
    )


@dataclass(frozen=True)
class StepSeconds:
    """Times of steps.

    Attributes:
        device: that it runs on.
        model: what it runs, on one rank.
        measured: seconds of the layers of each graph, behind no context.
        drafting: seconds to draft, by how many requests that is for at most.

    """

    device: Device
    model: ModelCosts
    measured: Mapping[GraphShape, float] = field(default_factory=dict)
    drafting: Mapping[int, float] = field(default_factory=dict)

    def at(
        self,
        nodes: int,
        *,
        requests: int,
        drafting: int | None = None,
        context: float = 0.0,
        other_rows: int = 0,
    ) -> float:
        """Seconds of a step; infinite of one with trees that has no graph, where there are graphs.

        It is launched layer by layer, and none such was timed.

        Args:
            nodes: of each tree; 0 for a plain step, which nothing is drafted for.
            requests: of the step.
            drafting: of these, those that have a tree; None for all.
            context: tokens before each request's rows, on average.
            other_rows: rows of prompts beside them.

        """
        drafting = requests if drafting is None else drafting
        rows = requests + nodes * drafting
        # A step with a prompt has no full graph.
        layers = None if other_rows else self._measured(rows, requests, nodes + 1)
        if layers is None:
            if nodes and self.measured and not other_rows:
                return math.inf
            layers = self._scale * self.model.layers_seconds(self.device, rows + other_rows)
        return (
            layers
            + self.model.attention_seconds(
                self.device, requests=requests, rows=rows, context=context
            )
            + self.model.logits_seconds(self.device, rows)
            + (self._drafting(drafting) if nodes else 0.0)
        )

    def _measured(self, rows: int, requests: int, longest: int) -> float | None:
        """Of the graph that a step gets."""
        for graphs in self._graphs if longest == 1 else self._graphs[1:]:
            # Mostly the first one that has room for the rows.
            first = bisect_left(graphs, rows, key=itemgetter(0))
            for _, num_reqs, max_query_len, seconds in graphs[first:]:
                if requests <= num_reqs and longest <= max_query_len:
                    return seconds
        return None

    @cached_property
    def _graphs(self) -> tuple[list[tuple[int, int, int, float]], ...]:
        """Plain ones, then those of trees, each by preference."""
        graphs = [(graph, (*graph, self.measured[graph])) for graph in by_preference(self.measured)]
        return tuple(
            [entry for graph, entry in graphs if (graph.max_query_len > 1) == has_trees]
            for has_trees in (False, True)
        )

    def _drafting(self, requests: int) -> float:
        """To draft for so many: as for the next more that were timed, or the most."""
        timed = sorted(self.drafting)
        at = next((batch for batch in timed if batch >= requests), timed[-1] if timed else None)
        return 0.0 if at is None else self.drafting[at]

    @cached_property
    def _scale(self) -> float:
        """How much longer steps take than arithmetic says."""
        ratios = [
            seconds / self.model.layers_seconds(self.device, graph.num_tokens)
            for graph, seconds in self.measured.items()
        ]
        return median(ratios) if ratios else 1.0
