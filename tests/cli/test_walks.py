"""The walks that `vllm-recycle tune` counts: each node at its place of the template."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from engines import TARGET, core
from test_structured_output import APPLES, SCHEMA

from vllm_recycle.cli.bench import driver
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.bench.prompts import Prompt
from vllm_recycle.cli.bench.worker import Worker
from vllm_recycle.core.tree import children_of, load_tree

TREE = "paper-80"


@pytest.fixture
def worker():
    plan = Plan(
        TARGET,
        Path("prompts.jsonl"),
        (Prompt((APPLES,), json_schema=SCHEMA),),
        {},
        dtype="float32",
        engine_args={"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20},
    )
    config = {"method": "token_recycling", "tree": TREE, "budget_share": 1.0, "row_cost": 0}
    engine = driver.engine_arguments(plan, config)
    made = Worker(engine, [asdict(prompt) for prompt in plan.prompts], False, events=print)
    yield made
    made.engine.engine_core.shutdown()


def test_nodes_are_counted_at_their_places_though_a_grammar_forbids_some(worker, monkeypatch):
    children = children_of(load_tree(TREE).parents[1:].tolist())
    scheduler = core(worker.llm).scheduler
    take_drafts, update = scheduler.update_draft_token_ids, scheduler.update_from_output
    passed: Counter[int] = Counter()
    draft: list[int] = []  # the last one, whole
    allowed: list[int] = []  # its rows that the grammar allows
    seen: Counter[str] = Counter()

    def watched_drafts(given: Any) -> None:
        (draft[:],) = given.draft_token_ids
        take_drafts(given)
        for request in scheduler.running:
            allowed[:] = scheduler.masks.allowed_rows(request)

    def watched_update(step: Any, output: Any) -> Any:
        if step.scheduled_spec_decode_tokens:
            seen["trees"] += 1
            *accepted, _ = output.sampled_token_ids[0]
            row = 0
            for token in accepted:
                below = (child for child in children[row] if child <= len(draft))
                (row,) = (child for child in below if draft[child - 1] == token)
                passed[row] += 1
            seen["walks past what is forbidden"] += bool({*range(1, row)} - {*allowed})
        return update(step, output)

    monkeypatch.setattr(scheduler, "update_draft_token_ids", watched_drafts)
    monkeypatch.setattr(scheduler, "update_from_output", watched_update)
    reply = worker.acceptance(
        start=0, stop=1, concurrency=1, max_tokens=32, ignore_eos=False, temperature=0.0
    )
    assert seen["walks past what is forbidden"] > 0
    assert reply["trees"] == seen["trees"]
    assert dict(reply["passed"]) == passed
