"""The tree of Token Recycling that a model's own text wants: the nodes that walks pass most.

The prompts are decoded greedily, one at a time, with a large tree of candidates, and the walks
through each node are counted. The most frequent nodes, best first, make the template, so that
every prefix is the best tree of its size: a node is never more frequent than its parent, and
parents come first. The shipped `default` tree was made in this way.
"""

from __future__ import annotations

import dataclasses
import heapq
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from vllm_recycle.cli import RunError
from vllm_recycle.cli.bench import driver
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.bench.progress import Progress
from vllm_recycle.cli.tune.state import State
from vllm_recycle.core.tree import MAX_NODES, TreeTemplate, from_rank_paths
from vllm_recycle.integration.options.token_recycling import (
    TOKEN_RECYCLING,
    TokenRecyclingOptions,
)

RankPath = tuple[int, ...]
# A guess at how likely each rank is the token that comes, only to choose the candidates.
RANK_WEIGHTS = (0.55, 0.13, 0.07, 0.045, 0.03, 0.022, 0.018, 0.015)
FIRST_RANK_AGAIN = 1.15  # text that repeats itself goes on repeating
MAX_DEPTH = 14
NUM_CANDIDATES = MAX_NODES - 1
DEFAULT_NODES = 80  # as many as the paper's tree has
SHOWN_SIZES = (1, 3, 7, 15, 31, 47, 63, 80, 127, NUM_CANDIDATES)


def measure_tree(
    plan: Plan, state: State, fixed: dict[str, Any], *, max_nodes: int | None
) -> tuple[TreeTemplate, dict[str, Any]]:
    """The template, and the configuration that it belongs to, without its `tree`.

    Args:
        plan: of the run, without methods.
        state: what was measured before; gets what is measured now.
        fixed: keys of the configuration.
        max_nodes: of the template; None for 80, and what is best for the device of these.

    Raises:
        RunError: no walk passed any node.
    """
    k = fixed.get("k", TokenRecyclingOptions.k)
    candidates = from_rank_paths(candidate_paths(k), name="candidates")
    _measure(plan, state, fixed, candidates)
    trees = sum(one["trees"] for one in state.measurements)
    passed: Counter[int] = Counter()
    for one in state.measurements:
        passed.update(dict(one["passed"]))
    if not passed:
        raise RunError(f"no node of {trees} trees was accepted, expected prompts with more to say")
    rows = sorted(passed, key=lambda row: (-passed[row], row))[: max_nodes or DEFAULT_NODES]
    expected = {
        size: round(1 + sum(passed[row] for row in rows[:size]) / trees, 3)
        for size in (*(size for size in SHOWN_SIZES if size < len(rows)), len(rows))
    }
    print("mean accepted tokens: " + ", ".join(f"{e} with {n} nodes" for n, e in expected.items()))
    provenance = {
        "order": "best first: by how often the walk passed a node",
        "made by": "vllm-recycle tune --method token_recycling",
        **{key: state.conditions[key] for key in ("model", "prompts", "num_prompts", "max_tokens")},
        "dtype": state.measurements[0]["dtype"],
        "speculative_config": fixed,
        "candidates": f"{NUM_CANDIDATES} nodes, depth at most {MAX_DEPTH}",
        "trees": trees,
        "mean accepted tokens by nodes": expected,
    }
    paths = [_rank_path(candidates, row) for row in rows]
    tree = from_rank_paths(paths, name="tuned", provenance=provenance)
    return tree, dict(fixed)


def candidate_paths(k: int) -> list[RankPath]:
    """The likeliest rank paths by `RANK_WEIGHTS` below rank k, likeliest first."""
    heap: list[tuple[float, RankPath]] = [(-1.0, ())]
    found: list[RankPath] = []
    while len(found) < NUM_CANDIDATES and heap:
        score, path = heapq.heappop(heap)
        if path:
            found.append(path)
        for rank, weight in enumerate(RANK_WEIGHTS[:k]) if len(path) < MAX_DEPTH else ():
            again = FIRST_RANK_AGAIN if path and not any((*path, rank)) else 1.0
            heapq.heappush(heap, (score * weight * again, (*path, rank)))
    return found


def _measure(plan: Plan, state: State, fixed: dict[str, Any], candidates: TreeTemplate) -> None:
    """Decode the prompts that the state lacks."""
    done, count = len(state.measurements), len(plan.prompts)
    if done == count:
        return
    with (
        Progress(count, unit="prompts", done=done) as progress,
        tempfile.TemporaryDirectory() as folder,
    ):
        candidates.save(Path(folder) / "candidates.json")
        config = {**fixed, "tree": f"{folder}/candidates.json", "budget_share": 1.0}
        plan = dataclasses.replace(plan, methods={TOKEN_RECYCLING: config})
        with driver.children(plan) as running:
            child = running[TOKEN_RECYCLING]
            progress.begin("load the engine")
            engine = driver.load(plan, child, config)
            about = {key: engine[key] for key in ("device", "dtype")}
            arguments = driver.pass_arguments(plan, 1, 0)
            for prompt in range(done, count):
                progress.begin(f"prompt {prompt + 1}")
                reply = child.ask("acceptance", **arguments | {"start": prompt, "stop": prompt + 1})
                state.add(trees=reply["trees"], passed=reply["passed"], **about)
                progress.finish()


def _rank_path(tree: TreeTemplate, row: int) -> RankPath:
    return tuple(int(tree.ranks[step]) for step in tree.paths[row].tolist() if step > 0)
