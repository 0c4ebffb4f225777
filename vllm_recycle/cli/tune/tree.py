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

from tqdm import tqdm

from vllm_recycle.cli import RunError
from vllm_recycle.cli.bench import driver
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.tune.state import State
from vllm_recycle.core.tree import MAX_NODES, TreeTemplate, from_rank_paths
from vllm_recycle.integration.options import CPU_MAX_NODES, TokenRecyclingOptions

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
        state: what was measured before; gets what is measured now, as one sum over prompts.
        fixed: keys of the configuration.
        max_nodes: of the template; None for 80, and what is best for the device of these.

    Raises:
        RunError: no walk passed any node.
    """
    k = fixed.get("k", TokenRecyclingOptions.k)
    candidates = from_rank_paths(candidate_paths(k), name="candidates")
    total = _measure(plan, state, fixed, candidates)
    passed = Counter(dict(total["passed"]))
    if not passed:
        raise RunError(
            f"in {total['trees']} trees no node was accepted: give more or other prompts"
        )
    rows = sorted(passed, key=lambda row: (-passed[row], row))[: max_nodes or DEFAULT_NODES]
    expected = {
        size: round(1 + sum(passed[row] for row in rows[:size]) / total["trees"], 3)
        for size in (*(size for size in SHOWN_SIZES if size < len(rows)), len(rows))
    }
    print("mean accepted tokens: " + ", ".join(f"{e} with {n} nodes" for n, e in expected.items()))
    provenance = {
        "order": "best first: by how often the walk passed a node",
        "made by": "vllm-recycle tune --method token_recycling",
        **{key: state.conditions[key] for key in ("model", "prompts", "num_prompts", "max_tokens")},
        "dtype": total["dtype"],
        "speculative_config": fixed,
        "candidates": f"{NUM_CANDIDATES} nodes, depth at most {MAX_DEPTH}",
        "trees": total["trees"],
        "mean accepted tokens by nodes": expected,
    }
    paths = [_rank_path(candidates, row) for row in rows]
    tree = from_rank_paths(paths, name="tuned", provenance=provenance)
    config = dict(fixed)
    if max_nodes is None and total["device"] == "cpu" and tree.num_nodes > CPU_MAX_NODES:
        config["max_nodes"] = CPU_MAX_NODES
    return tree, config


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


def _measure(
    plan: Plan, state: State, fixed: dict[str, Any], candidates: TreeTemplate
) -> dict[str, Any]:
    """The sum over all prompts; those that the state lacks are decoded."""
    total = dict(state.measurements[0]) if state.measurements else {"prompts": 0, "trees": 0}
    passed = Counter(dict(total.get("passed", ())))
    count = len(plan.prompts)
    with (
        tqdm(total=count, initial=total["prompts"], disable=None, unit="prompt") as progress,
        tempfile.TemporaryDirectory() as folder,
    ):
        if total["prompts"] == count:
            return total
        file = Path(folder) / "candidates.json"
        candidates.save(file)
        config = {**fixed, "tree": str(file), "budget_share": 1.0}
        plan = dataclasses.replace(plan, methods={"token_recycling": config})
        with driver.children(plan) as running:
            child = running["token_recycling"]
            engine = driver.load(plan, child, config)
            total |= {key: engine[key] for key in ("device", "dtype")}
            arguments = driver.pass_arguments(plan, 1, 0)
            for prompt in range(total["prompts"], count):
                reply = child.ask("acceptance", **arguments | {"start": prompt, "stop": prompt + 1})
                passed.update(dict(reply["passed"]))
                total["prompts"] += 1
                total["trees"] += reply["trees"]
                total["passed"] = sorted(passed.items())
                state.replace([total])
                progress.update()
    return total


def _rank_path(tree: TreeTemplate, row: int) -> RankPath:
    return tuple(tree.ranks[step].item() for step in tree.paths[row].tolist() if step > 0)
