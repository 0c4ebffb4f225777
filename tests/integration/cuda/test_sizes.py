"""The scheduler of Model Runner V2 takes the size of trees that is worth its time, or none.

What steps cost is replaced between batches of requests, so that rows are free, or dear.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import core, counter, engine, runner
from v2_engines import GREEDY, GROWN, LLM_ARGUMENTS, SEEDED, TREE, Waits, tokens_of
from v2_graphs import Graph
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.eplb_utils import EPLBController

from vllm_recycle.core.curve import TREES, Load
from vllm_recycle.core.graph_curve import GraphShape, GraphTimes
from vllm_recycle.integration.cuda import runner as v2_runner
from vllm_recycle.integration.cuda.graphs import replace_full_graphs
from vllm_recycle.integration.cuda.time_steps import ROUNDS, time_graphs

pytestmark = pytest.mark.slow

NODES = TREE.num_nodes
BATCH = [((0, 16), GREEDY | {"max_tokens": 24}), ((0, 20), SEEDED | {"max_tokens": 24})]
# Seconds of a row more than the first, whose step takes a second.
FREE, DEAR = 0.0, 1.0


def test_tokens_are_the_same_whatever_the_size(result):
    for name in ("at first", "dear rows", "free rows"):
        assert result[name]["token ids"] == result["plain"]


def test_what_is_known_comes_with_the_tokens_of_steps(result):
    learnt = result["learnt"]
    assert learnt["nodes"] == NODES
    assert 0 < learnt["gain"] <= NODES
    assert learnt["drafting seconds"] > 0
    assert learnt["reports"] > 0
    assert set(learnt["requests of a report"]) <= {1, 2}


def test_whole_trees_are_drafted_where_that_is_timed_and_nothing_is_left(result):
    timed = result["timed"]
    assert timed["nodes"] == [NODES] * (1 + ROUNDS)
    assert timed["entries"] > 0
    assert result["left"] == {"entries": 0, "tokens": 0, "stamps": 0}


def test_rows_that_are_dear_are_not_drafted(result):
    sizes = result["dear rows"]["sizes"]
    assert sizes[-1] == 0
    assert sizes.count(0) > len(sizes) / 2
    # Trees are grown now and then all the same, and verified by nobody.
    assert 0 < result["dear rows"]["grown at 0"] < sizes.count(0) / 2


def test_rows_that_are_free_are_drafted(result):
    sizes = result["free rows"]["sizes"]
    assert sizes[-1] == NODES
    settled = sizes[6:]  # behind looks at what is new
    assert settled.count(NODES) > len(settled) / 2
    assert result["free rows"]["accepted tokens"] > 0


def test_each_captured_graph_is_replayed(result):
    assert result["timed graphs"] == [[2, 2, 1], [9, 1, 9]]
    # To warm up, and five times for the median, behind no context and behind the longest.
    assert result["replays"] == [12, 12]
    longest = 112 - 9
    assert result["lengths"] == [*[1] * 6, *[1 + longest] * 6, *[9] * 6, *[9 + longest] * 6]


def test_timing_is_no_load_of_experts(result):
    can_suppress = hasattr(EPLBController, "suppress")  # vLLM 0.33 and later
    assert result["timed"]["load of experts counts"] == (not can_suppress)


def test_nothing_waits_for_the_device(result):
    assert result["waits"] == []


def watch_timing() -> dict[str, Any]:
    """In the process with the engine: what is drafted where that is timed."""
    seen: dict[str, Any] = {"nodes": []}
    find = v2_runner.find_graph_times

    def watched_find(model_runner: Any) -> GraphTimes:
        seen["entries"] = model_runner.tree_drafter.state.matrix.num_written
        seen["load of experts counts"] = not model_runner.eplb.suppressed
        speculator = model_runner.speculator
        runs = {batch: watched(run) for batch, run in speculator.drafting_runs().items()}
        speculator.drafting_runs = lambda: runs
        return find(model_runner)

    def watched(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
        return lambda: seen["nodes"].append(int((run() >= 0).sum()))

    v2_runner.find_graph_times = watched_find
    return seen


def left_by(drafter: Any) -> dict[str, int]:
    """What is known when the engine has started."""
    return {
        "entries": drafter.state.matrix.num_written,
        "tokens": int(drafter.texts.lengths.sum()),
        "stamps": int(drafter.stamps.count_nonzero()),
    }


def main(_: Path) -> dict[str, Any]:
    """In the process with the engines: one without trees, and one with them."""
    with engine(**LLM_ARGUMENTS) as llm:
        result: dict[str, Any] = {"plain": tokens_of(llm, BATCH)}
    result["timed"] = watch_timing()
    with engine(GROWN, **LLM_ARGUMENTS) as llm:
        result["left"] = left_by(runner(llm).tree_drafter)
        scheduler, speculator, waits = core(llm).scheduler, runner(llm).speculator, Waits()
        sizes: list[int] = []
        reports: list[int] = []
        times: list[GraphTimes] = []
        grown_at_0: list[int] = []
        schedule, report = scheduler.schedule, speculator._report
        learn = scheduler.sizes.learn

        def watched_schedule(*args: Any) -> Any:
            output = schedule(*args)
            if output.total_num_scheduled_tokens:
                sizes.append(output.num_spec_tokens_to_schedule)
            return output

        def watched_report(input_batch: Any, num_speculative_tokens: int | None) -> None:
            grown_at_0.append(num_speculative_tokens == 0)
            report(input_batch, num_speculative_tokens)

        def watched_learn(scheduler_output: Any, model_runner_output: Any) -> None:
            if (said := getattr(model_runner_output, "draft_report", None)) is not None:
                reports.append(said.num_reqs)
                times.extend([said.times] if said.times else [])
            learn(scheduler_output, model_runner_output)

        def as_measured(output: Any) -> float | None:
            """Steps take what graphs are said to, and not what they take in the interpreter."""
            requests, chooser = len(output.num_scheduled_tokens), scheduler.sizes.chooser
            if chooser is None or not requests:
                return None
            rows = np.array([output.total_num_scheduled_tokens])
            [seconds] = chooser.curve.measured(TREES, Load(requests), rows)
            return float(seconds) if np.isfinite(seconds) else None

        scheduler.schedule, scheduler.sizes.learn = watched_schedule, watched_learn
        scheduler.sizes._seconds = as_measured
        speculator._report = watched_report
        waits.watch(speculator, "propose")

        def serve() -> dict[str, Any]:
            sizes.clear()
            grown_at_0.clear()
            before = counter(llm, "spec_decode_num_accepted_tokens")
            token_ids = tokens_of(llm, BATCH)
            return {
                "token ids": token_ids,
                "sizes": list(sizes),
                "grown at 0": sum(grown_at_0),
                "accepted tokens": counter(llm, "spec_decode_num_accepted_tokens") - before,
            }

        result["at first"] = serve()
        worth = scheduler.sizes.worths[TREES].worth
        result["learnt"] = {
            "nodes": len(worth),
            "gain": float(worth.sum()),
            "drafting seconds": max(times[0].drafting[TREES].values()),
            "reports": len(reports),
            "requests of a report": sorted(set(reports)),
        }
        for name, seconds in (("dear rows", DEAR), ("free rows", FREE)):
            graphs = {GraphShape(n, n, n): (1.0 + seconds * (n - 1), 0.0) for n in range(1, 65)}
            scheduler.sizes.take_times(GraphTimes(graphs, {TREES: {}}))
            result[name] = serve()
        manager, plain = runner(llm).cudagraph_manager, (2, 2, 1)
        full = BatchExecutionDescriptor(CUDAGraphMode.FULL, *plain)
        manager._capture_descs = {CUDAGraphMode.FULL: [full]}
        replace_full_graphs(manager, [GraphShape(*plain), GraphShape(NODES + 1, 1, NODES + 1)])
        descs = sorted(manager._capture_descs[CUDAGraphMode.FULL], key=lambda desc: desc.num_tokens)
        lengths: list[int] = []
        seq_lens = runner(llm).input_buffers.seq_lens
        manager.graphs = {desc: Graph() for desc in descs}
        for graph in manager.graphs.values():
            graph.launches.append(lambda: lengths.append(int(seq_lens[0])))
        manager.hidden_states = torch.zeros(NODES + 1, runner(llm).model_config.get_hidden_size())
        with torch.inference_mode():
            result["timed graphs"] = sorted(time_graphs(runner(llm)))
        result["replays"] = [graph.num_replays for graph in manager.graphs.values()]
        result["lengths"] = lengths
    return result | {"waits": waits.seen}
