"""The scheduler of Model Runner V2 takes the size of trees that is worth its time, or none.

What steps cost is replaced between batches of requests, so that rows are free, or dear.

And steps are replayed from full graphs, whatever rows their requests have. The graphs are those of
`v2_graphs`: what vLLM's manager captures and dispatches to is a recording of launches on the
tensors of the capture. Plain steps are not captured: their attention is vLLM's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.eplb_utils import EPLBController

from tests.integration.cuda import v2_graphs
from tests.integration.cuda.schedulers import seconds_as_measured
from tests.integration.cuda.v2_engines import (
    GREEDY,
    GROWN,
    LLM_ARGUMENTS,
    SCHEDULE,
    SEEDED,
    TREE,
    Waits,
    tokens_of,
    with_sizes,
)
from tests.integration.engines import core, counter, engine, runner, watch_steps
from vllm_recycle.core.curve import TREES
from vllm_recycle.core.graph_curve import GraphShape, GraphTimes
from vllm_recycle.integration.cuda import runner as v2_runner
from vllm_recycle.integration.cuda.graphs import plan_full_graphs, replace_full_graphs
from vllm_recycle.integration.cuda.time_steps import (
    ROUNDS,
    describe_capture,
    describe_times,
    time_graphs,
)

pytestmark = [pytest.mark.slow, pytest.mark.versions]

NODES = TREE.num_nodes
BATCH = [((0, 16), GREEDY | {"max_tokens": 24}), ((0, 20), SEEDED | {"max_tokens": 24})]
# As many batches, which are replayed.
REPLAYED = [
    # Trees beside requests without: one looks back, one has opted out.
    [
        ((0, 16), GREEDY),
        ((0, 33), {**GREEDY, "repetition_penalty": 1.3}),
        ((3, 40), SEEDED),
        ((0, 24), {**GREEDY, "extra_args": {"speculate": False}}),
    ],
    # One whose prompt takes several steps, while another decodes; its trees are cut at the end.
    [((0, 44), {**GREEDY, "max_tokens": 60}), ((0, 84), {**GREEDY, "max_tokens": 28})],
]
# What becomes known: seconds of a row more than the first, whose step takes a second.
PRICES = {"at first": None, "dear rows": 1.0, "free rows": 0.0}


def test_tokens_are_the_same_whatever_the_size_and_nothing_waits(result):
    assert [result[name]["token ids"] for name in PRICES] == [result["plain"]] * 3
    assert result["waits"] == []


def test_what_is_known_comes_with_the_tokens_of_steps(result):
    learnt = result["learnt"]
    assert learnt["nodes"] == NODES
    assert 0 < learnt["gain"] <= NODES
    assert learnt["drafting seconds"] > 0
    assert {1, 2} >= set(learnt["requests of reports"]) > set()


def test_whole_trees_are_drafted_where_that_is_timed_and_nothing_is_left(result):
    timed = result["timed"]
    assert timed["nodes"] == [NODES] * (1 + ROUNDS)
    assert timed["entries"] > 0
    assert result["left"] == {"entries": 0, "tokens": 0, "stamps": 0}
    # Nor is timing a load of experts, with vLLM 0.33 and later.
    assert timed["load of experts counts"] == (not hasattr(EPLBController, "suppress"))


def test_rows_that_are_dear_are_not_drafted_and_those_that_are_free_are(result):
    sizes = result["dear rows"]["sizes"]
    assert sizes[-1] == 0
    assert sizes.count(0) > len(sizes) / 2
    # Trees are grown now and then all the same, and verified by nobody.
    assert 0 < result["dear rows"]["grown at 0"] < sizes.count(0) / 2
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


def test_the_log_says_what_the_start_took(result):
    assert result["said"] == [
        "captured graphs in 5.1 s and 0.75 GiB, 1 of the 2 full ones for drafts",
        "sizes of trees are chosen step by step; 2 graphs and drafting timed in 1.3 s; drafting, "
        "in ms for requests: trees take 2.00 for 1",
    ]


def test_every_step_of_trees_without_a_prompt_is_replayed(result):
    assert result["replayed"]["token ids"] == result["plain of replayed"]
    seen = result["replayed"]["seen"]
    assert min(seen["accepted tokens"], seen["filled up"], seen["trees beside a prompt"]) > 0
    assert "trees beside a prompt, replayed" not in seen
    for kind in ("trees alone", "trees beside plain requests", "trees of several sizes"):
        assert seen[f"{kind}, replayed"] == seen[kind] > 0


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


def capture(model_runner: Any) -> None:
    """As the start of an engine does on a GPU, of the graphs for trees."""
    manager = model_runner.cudagraph_manager
    manager.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    manager.pool = object()  # which vLLM 0.31 asks a GPU for
    full = BatchExecutionDescriptor(CUDAGraphMode.FULL, 1, 1, 1)
    manager._capture_descs[CUDAGraphMode.FULL] = [full]
    shapes = plan_full_graphs(
        model_runner.sizes_of_batch, [LLM_ARGUMENTS["max_num_batched_tokens"]]
    )
    replace_full_graphs(manager, [shape for shape in shapes if shape.max_query_len > 1])
    names = ["model", "model_state", "input_buffers", "intermediate_tensors", "block_tables"]
    names += ["attn_groups", "kv_cache_config"]
    manager.capture(*attrgetter(*names)(model_runner))


def kind_of(input_batch: Any) -> str:
    """What a step is like."""
    if (num_nodes := input_batch.num_draft_tokens_per_req) is None:
        return "no trees"
    if input_batch.has_prefill:
        return "trees beside a prompt"
    if not num_nodes.all():
        return "trees beside plain requests"
    return "trees alone" if len(set(num_nodes)) == 1 else "trees of several sizes"


def watch_replays(model_runner: Any, seen: Counter) -> None:
    """In the process with the engines: count what steps are like, and which are replayed."""
    prepare_attn, manager = model_runner.prepare_attn, model_runner.cudagraph_manager
    run_fullgraph = manager.run_fullgraph

    def watched_prepare_attn(input_batch: Any) -> Any:
        model_runner.kind = kind_of(input_batch)
        seen[model_runner.kind] += 1
        seen["filled up"] += input_batch.num_tokens < input_batch.num_tokens_after_padding
        return prepare_attn(input_batch)

    def watched_run_fullgraph(desc: Any) -> Any:
        seen[f"{model_runner.kind}, replayed"] += 1
        return run_fullgraph(desc)

    model_runner.prepare_attn, manager.run_fullgraph = watched_prepare_attn, watched_run_fullgraph


def serve_replayed() -> dict[str, Any]:
    """In the process with the engines: one that replays steps of trees."""
    v2_graphs.install()
    seen: Counter = Counter()
    with engine(with_sizes(GROWN, SCHEDULE), **LLM_ARGUMENTS) as llm:
        capture(runner(llm))
        watch_replays(runner(llm), seen)
        token_ids = tokens_of(llm, *REPLAYED)
        seen["accepted tokens"] = counter(llm, "spec_decode_num_accepted_tokens")
    return {"token ids": token_ids, "seen": seen}


def watch_reports(llm: Any, learnt: dict[str, Any]) -> None:
    """In the process with the engine: what comes with the tokens of steps, and is learnt from."""
    sizes, speculator = core(llm).scheduler.sizes, runner(llm).speculator
    report, learn = speculator._report, sizes.learn

    def watched_report(input_batch: Any, num_speculative_tokens: int | None) -> None:
        learnt["grown at 0"] += num_speculative_tokens == 0
        report(input_batch, num_speculative_tokens)

    def watched_learn(scheduler_output: Any, model_runner_output: Any) -> None:
        if (said := getattr(model_runner_output, "draft_report", None)) is not None:
            learnt["requests of reports"].append(said.num_reqs)
            if said.times and "drafting seconds" not in learnt:
                learnt["drafting seconds"] = max(said.times.drafting[TREES].values())
        learn(scheduler_output, model_runner_output)

    speculator._report, sizes.learn = watched_report, watched_learn


def time_captured_graphs(model_runner: Any) -> dict[str, Any]:
    """In the process with the engine: what is replayed where graphs are timed."""
    manager, plain = model_runner.cudagraph_manager, (2, 2, 1)
    full = BatchExecutionDescriptor(CUDAGraphMode.FULL, *plain)
    manager._capture_descs = {CUDAGraphMode.FULL: [full]}
    replace_full_graphs(manager, [GraphShape(*plain), GraphShape(NODES + 1, 1, NODES + 1)])
    descs = sorted(manager._capture_descs[CUDAGraphMode.FULL], key=lambda desc: desc.num_tokens)
    lengths: list[int] = []
    seq_lens = model_runner.input_buffers.seq_lens
    manager.graphs = {desc: v2_graphs.Graph() for desc in descs}
    for graph in manager.graphs.values():
        graph.launches.append(lambda: lengths.append(int(seq_lens[0])))
    manager.hidden_states = torch.zeros(NODES + 1, model_runner.model_config.get_hidden_size())
    with torch.inference_mode():
        times = time_graphs(model_runner)
    found = GraphTimes(times, {TREES: {1: 0.002}})
    said = [describe_capture(manager, 5.06, 3 << 28)]
    return {
        "timed graphs": sorted(times),
        "replays": [graph.num_replays for graph in manager.graphs.values()],
        "lengths": lengths,
        "said": [*said, describe_times(found, 1.26)],
    }


def main(_: Path) -> dict[str, Any]:
    """In the process with the engines: one without trees, and two with them."""
    with engine(**LLM_ARGUMENTS) as llm:
        result: dict[str, Any] = {"plain": tokens_of(llm, BATCH)}
        result["plain of replayed"] = tokens_of(llm, *REPLAYED)
    result["timed"] = watch_timing()
    learnt: dict[str, Any] = {"requests of reports": []}
    with engine(GROWN, **LLM_ARGUMENTS) as llm:
        drafter, steps, waits = runner(llm).tree_drafter, watch_steps(llm), Waits()
        result["left"] = {
            "entries": drafter.state.matrix.num_written,
            "tokens": int(drafter.texts.lengths.sum()),
            "stamps": int(drafter.stamps.count_nonzero()),
        }
        sizes = core(llm).scheduler.sizes
        watch_reports(llm, learnt)
        # Steps take what graphs are said to, and not what they take in the interpreter.
        sizes._seconds = partial(seconds_as_measured, sizes)
        waits.watch(runner(llm).speculator, "propose")
        for name, seconds in PRICES.items():
            if seconds is not None:
                graphs = {GraphShape(n, n, n): (1.0 + seconds * (n - 1), 0.0) for n in range(1, 65)}
                sizes.take_times(GraphTimes(graphs, {TREES: {}}))
            steps.clear()
            learnt["grown at 0"] = 0
            before = counter(llm, "spec_decode_num_accepted_tokens")
            token_ids = tokens_of(llm, BATCH)
            made = [step for step in steps if step.total_num_scheduled_tokens]
            result[name] = {
                "token ids": token_ids,
                "sizes": [step.num_spec_tokens_to_schedule for step in made],
                "grown at 0": learnt["grown at 0"],
                "accepted tokens": counter(llm, "spec_decode_num_accepted_tokens") - before,
            }
        worth = sizes.worths[TREES].worth
        result["learnt"] = learnt | {"nodes": len(worth), "gain": float(worth.sum())}
        result |= time_captured_graphs(runner(llm))
    return result | {"waits": waits.seen, "replayed": serve_replayed()}
