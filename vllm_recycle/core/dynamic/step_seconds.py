"""The time of a step by the size of its trees: measured where it was, else a scaled roofline.

`prices` has the times of a CPU, by rows and measured at several loads; here a step is one of
captured graphs, each of so many requests with as many rows, filled up to the next larger one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from vllm_recycle.core.dynamic.roofline import Device, ModelCosts


@dataclass(frozen=True)
class StepSeconds:
    """Times of steps.

    Attributes:
        device: that it runs on.
        model: what it runs, on one rank.
        measured: seconds of the layers by (rows of a request, requests), behind no context.
        drafting: seconds to draft for a batch.

    """

    device: Device
    model: ModelCosts
    measured: Mapping[tuple[int, int], float] = field(default_factory=dict)
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
        # Trees beside others have no full graph; nor has a prompt.
        is_uniform = not other_rows and (drafting == requests or not nodes)
        layers = self._measured(nodes + 1, requests) if is_uniform else None
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

    def _measured(self, rows: int, requests: int) -> float | None:
        """Of the graph that a step gets, the next larger one."""
        sizes = self._graphs.get(rows, [])
        index = bisect_left(sizes, requests)
        return self.measured[rows, sizes[index]] if index < len(sizes) else None

    @cached_property
    def _graphs(self) -> dict[int, list[int]]:
        """By rows of a request, the numbers of requests, ascending."""
        graphs: dict[int, list[int]] = {}
        for rows, requests in sorted(self.measured):
            graphs.setdefault(rows, []).append(requests)
        return graphs

    @cached_property
    def _scale(self) -> float:
        """How much longer steps take than arithmetic says."""
        ratios = [
            seconds / self.model.layers_seconds(self.device, rows * requests)
            for (rows, requests), seconds in self.measured.items()
        ]
        return median(ratios) if ratios else 1.0
