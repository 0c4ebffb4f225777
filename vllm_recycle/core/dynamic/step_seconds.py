"""The time of a step by the size of its trees: measured where it was, else a scaled roofline.

`prices` has the times of a CPU, by rows and measured at several loads; here a step is one of
captured graphs, filled up to what the graph has room for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import NamedTuple

from vllm_recycle.core.dynamic.roofline import Device, ModelCosts


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

    def holds(self, step: GraphShape) -> bool:
        """Whether a graph has room for a step."""
        return all(room >= need for room, need in zip(self, step, strict=True))


def by_preference(shapes: Iterable[GraphShape]) -> list[GraphShape]:
    """Graphs in the order in which a step tries them: plain ones, then the smaller first."""
    return sorted(
        shapes,
        key=lambda shape: (shape.max_query_len > 1, shape.num_tokens, shape.max_query_len),
    )


@dataclass(frozen=True)
class StepSeconds:
    """Times of steps.

    Attributes:
        device: that it runs on.
        model: what it runs, on one rank.
        measured: seconds of the layers of each graph, behind no context.
        drafting: seconds to draft for a batch.

    """

    device: Device
    model: ModelCosts
    measured: Mapping[GraphShape, float] = field(default_factory=dict)
    drafting: float = 0.0

    def at(
        self,
        nodes: int,
        *,
        requests: int,
        drafting: int | None = None,
        context: float = 0.0,
        other_rows: int = 0,
    ) -> float:
        """Seconds of a step.

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
        step = GraphShape(rows, requests, nodes + 1)
        layers = self._measured(step) if not other_rows else None
        if layers is None:
            layers = self._scale * self.model.layers_seconds(self.device, rows + other_rows)
        return (
            layers
            + self.model.attention_seconds(
                self.device, requests=requests, rows=rows, context=context
            )
            + self.model.logits_seconds(self.device, rows)
            + (self.drafting if nodes else 0.0)
        )

    def _measured(self, step: GraphShape) -> float | None:
        """Of the graph that a step gets."""
        return next((self.measured[graph] for graph in self._graphs if graph.holds(step)), None)

    @cached_property
    def _graphs(self) -> list[GraphShape]:
        return by_preference(self.measured)

    @cached_property
    def _scale(self) -> float:
        """How much longer steps take than arithmetic says."""
        ratios = [
            seconds / self.model.layers_seconds(self.device, graph.num_tokens)
            for graph, seconds in self.measured.items()
        ]
        return median(ratios) if ratios else 1.0
