"""How often the walk of Token Recycling passes each row of the tree, watched in a live engine."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(slots=True)
class WalkCounts:
    """Of the walks watched: how many had a draft, and how many passed each row below the root."""

    trees: int = 0
    passed: Counter[int] = field(default_factory=Counter)


@contextlib.contextmanager
def counted(engine: Any) -> Iterator[WalkCounts]:
    """Watch the walks of a `vllm.LLMEngine` that runs in this process."""
    core = engine.engine_core.engine_core
    # What a grammar forbids stays, so that a row is the same node in each tree.
    core.scheduler.keeps_places = True
    proposer = core.model_executor.driver_worker.worker.model_runner.drafter.proposer
    operations, counts = proposer.operations, WalkCounts()

    def walk(sampled: Any, drafts: Any, cu_num_logits: Any, *, tree: Any) -> Any:
        result = operations.walk(sampled, drafts, cu_num_logits, tree=tree)
        has_draft = (cu_num_logits.diff() > 1).tolist()
        for path, counts_here in zip(result.path[:, 1:].tolist(), has_draft, strict=True):
            counts.trees += counts_here
            counts.passed.update(row for row in path if row >= 0)
        return result

    names = (name for name in dir(operations) if not name.startswith("_"))
    others = {name: getattr(operations, name) for name in names}
    proposer.operations = SimpleNamespace(**{**others, "walk": walk})
    try:
        yield counts
    finally:
        proposer.operations = operations
        core.scheduler.keeps_places = False
