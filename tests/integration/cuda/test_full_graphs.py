"""Steps on Model Runner V2 that are replayed from full graphs, whatever rows their requests have.

The graphs are those of `v2_graphs`: what vLLM's manager captures and dispatches to is a recording
of launches on the tensors of the capture. Plain steps are not captured: their attention is vLLM's.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import v2_graphs
from engines import counter, engine, runner
from v2_engines import GREEDY, GROWN, LLM_ARGUMENTS, SCHEDULE, SEEDED, tokens_of, with_sizes
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_recycle.integration.cuda.graphs import plan_full_graphs, replace_full_graphs

pytestmark = pytest.mark.slow

# Batches of requests: which tokens of TEXT are the prompt, and the sampling parameters.
BATCHES = [
    # Trees beside requests without: one looks back, one has opted out.
    [
        ((0, 16), GREEDY),
        ((0, 33), {**GREEDY, "repetition_penalty": 1.3}),
        ((3, 40), SEEDED),
        ((0, 24), {**GREEDY, "extra_args": {"speculate": False}}),
    ],
    # One whose prompt takes several steps, while another decodes; its trees are cut at the end.
    [((0, 16), {**GREEDY, "max_tokens": 88}), ((0, 84), {**GREEDY, "max_tokens": 28})],
]


def test_tokens_equal_those_without_speculation(result):
    assert result["replayed"] == result["plain"]
    assert result["seen"]["accepted tokens"] > 0


def test_every_step_of_trees_without_a_prompt_is_replayed(result):
    seen = result["seen"]
    for kind in ("trees alone", "trees beside plain requests", "trees of several sizes"):
        assert seen[kind] > 0
        assert seen[f"{kind}, replayed"] == seen[kind]
    assert seen["filled up"] > 0
    assert seen["trees beside a prompt"] > 0
    assert "trees beside a prompt, replayed" not in seen


def capture(runner: Any) -> None:
    """As the start of an engine does on a GPU, of the graphs for trees."""
    manager = runner.cudagraph_manager
    manager.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    full = BatchExecutionDescriptor(CUDAGraphMode.FULL, 1, 1, 1)
    manager._capture_descs[CUDAGraphMode.FULL] = [full]
    shapes = plan_full_graphs(runner.sizes_of_batch, [LLM_ARGUMENTS["max_num_batched_tokens"]])
    replace_full_graphs(manager, [shape for shape in shapes if shape.max_query_len > 1])
    manager.capture(
        runner.model,
        runner.model_state,
        runner.input_buffers,
        runner.intermediate_tensors,
        runner.block_tables,
        runner.attn_groups,
        runner.kv_cache_config,
    )


def kind_of(input_batch: Any) -> str:
    """What a step is like."""
    num_nodes = input_batch.num_draft_tokens_per_req
    if num_nodes is None:
        return "no trees"
    if input_batch.has_prefill:
        return "trees beside a prompt"
    if (num_nodes == 0).any():
        return "trees beside plain requests"
    return "trees alone" if len(set(num_nodes)) == 1 else "trees of several sizes"


def watch(runner: Any, seen: Counter) -> None:
    """In the process with the engines: count what steps are like, and which are replayed."""
    prepare_attn, manager = runner.prepare_attn, runner.cudagraph_manager
    run_fullgraph = manager.run_fullgraph

    def watched_prepare_attn(input_batch: Any) -> Any:
        runner.kind = kind_of(input_batch)
        seen[runner.kind] += 1
        seen["filled up"] += input_batch.num_tokens < input_batch.num_tokens_after_padding
        return prepare_attn(input_batch)

    def watched_run_fullgraph(desc: Any) -> Any:
        seen[f"{runner.kind}, replayed"] += 1
        return run_fullgraph(desc)

    runner.prepare_attn, manager.run_fullgraph = watched_prepare_attn, watched_run_fullgraph


def main(_: Path) -> dict[str, Any]:
    """In the process with the engines: one without trees, and one that replays them."""
    v2_graphs.install()
    seen: Counter = Counter()
    with engine(**LLM_ARGUMENTS) as llm:
        plain = tokens_of(llm, *BATCHES)
    with engine(with_sizes(GROWN, SCHEDULE), **LLM_ARGUMENTS) as llm:
        capture(runner(llm))
        watch(runner(llm), seen)
        replayed = tokens_of(llm, *BATCHES)
        seen["accepted tokens"] = counter(llm, "spec_decode_num_accepted_tokens")
    return {"plain": plain, "replayed": replayed, "seen": seen}
