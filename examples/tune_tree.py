"""A template for Token Recycling, measured on your own text: the nodes that walks pass most.

    python examples/tune_tree.py
    python examples/tune_tree.py --model DIR --prompts FILE.jsonl --chat --output my_tree.json

The prompts are decoded greedily, one at a time, with a large template of candidates, and the walks
through each node are counted. The most frequent nodes, best first, make the template. Every prefix
of it is the best template of its size, because a node is never more frequent than its parent. The
shipped template `default` was made in this way. It needs vLLM on a CPU, whose engine runs in this
process; the template goes with any device.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from vllm_recycle.cli.bench.prompts import read_prompts
from vllm_recycle.core.tree import MAX_NODES, TreeTemplate, children_of, from_rank_paths

RankPath = tuple[int, ...]
EXAMPLES = Path(__file__).parent
# A guess at how likely each rank is the token that comes, only to choose the candidates.
RANK_WEIGHTS = (0.55, 0.13, 0.07, 0.045, 0.03, 0.022, 0.018, 0.015)
FIRST_RANK_AGAIN = 1.15  # text that repeats itself goes on repeating
MAX_DEPTH = 14
NUM_CANDIDATES = MAX_NODES - 1
SHOWN_SIZES = (1, 3, 7, 15, 31, 47, 63, 80, 127, NUM_CANDIDATES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(EXAMPLES / "models/target"))
    parser.add_argument("--prompts", type=Path, default=EXAMPLES / "prompts/humaneval.jsonl")
    parser.add_argument("--num-prompts", type=int, help="only the first N prompts")
    parser.add_argument("--chat", action="store_true", help="use the model's chat template")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-nodes", type=int, default=80, help="nodes of the template")
    parser.add_argument("--output", type=Path, default=Path("tree.json"))
    args = parser.parse_args()

    prompts = [prompt.turns[0] for prompt in read_prompts(args.prompts)][: args.num_prompts]
    candidates = from_rank_paths(candidate_paths(), name="candidates")
    passed, trees = count_walks(args, prompts, candidates)
    rows = sorted(passed, key=lambda row: (-passed[row], row))[: args.max_nodes]
    if not rows:
        raise SystemExit(f"no node of {trees} trees was accepted: give longer prompts")
    sizes = sorted({size for size in SHOWN_SIZES if size < len(rows)} | {len(rows)})
    expected = {
        size: round(1 + sum(passed[row] for row in rows[:size]) / trees, 3) for size in sizes
    }
    provenance = {
        "order": "best first: by how often the walk passed a node",
        "made by": "examples/tune_tree.py",
        **{name: str(getattr(args, name)) for name in ("model", "prompts", "max_tokens", "dtype")},
        "num_prompts": len(prompts),
        "candidates": f"{NUM_CANDIDATES} nodes, depth at most {MAX_DEPTH}",
        "trees": trees,
        "mean accepted tokens by nodes": expected,
    }
    paths = [rank_path(candidates, row) for row in rows]
    from_rank_paths(paths, name="tuned", provenance=provenance).save(args.output)
    print("mean accepted tokens: " + ", ".join(f"{e} with {n} nodes" for n, e in expected.items()))
    config = {"method": "token_recycling", "tree": str(args.output.resolve())}
    print(f"--speculative-config '{json.dumps(config)}'")


def candidate_paths() -> list[RankPath]:
    """The likeliest rank paths by `RANK_WEIGHTS`, likeliest first."""
    heap: list[tuple[float, RankPath]] = [(-1.0, ())]
    found: list[RankPath] = []
    while len(found) < NUM_CANDIDATES:
        score, path = heapq.heappop(heap)
        if path:
            found.append(path)
        for rank, weight in enumerate(RANK_WEIGHTS) if len(path) < MAX_DEPTH else ():
            again = FIRST_RANK_AGAIN if path and not any((*path, rank)) else 1.0
            heapq.heappush(heap, (score * weight * again, (*path, rank)))
    return found


def count_walks(
    args: argparse.Namespace, prompts: list[str], candidates: TreeTemplate
) -> tuple[Counter[int], int]:
    """Decode the prompts; how often walks passed each node of the template, of how many walks."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler in this process
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "candidates.json"
        candidates.save(tree)
        # All candidates in each step, whatever their rows cost.
        config = {"method": "token_recycling", "row_cost": 0, "budget_share": 1.0}
        llm = LLM(
            args.model,
            dtype=args.dtype,
            speculative_config=config | {"tree": str(tree)},
            max_num_seqs=1,
            kv_cache_memory_bytes=2**29,  # by default most of the memory
        )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    update, children = scheduler.update_from_output, children_of(candidates.parents[1:].tolist())
    passed: Counter[int] = Counter()
    walks: list[int] = []

    def counted(step: Any, output: Any) -> Any:
        for request, draft in step.scheduled_spec_decode_tokens.items():
            *accepted, _ = output.sampled_token_ids[output.req_id_to_index[request]]
            token_ids = dict(enumerate(draft, start=1))  # a prefix of the template
            row = 0
            for token in accepted:
                (row,) = (child for child in children[row] if token_ids.get(child) == token)
                passed[row] += 1
            walks.append(row)
        return update(step, output)

    scheduler.update_from_output = counted
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    for prompt in prompts:
        if args.chat:
            llm.chat([{"role": "user", "content": prompt}], params)
        else:
            llm.generate(prompt, params)
    return passed, len(walks)


def rank_path(tree: TreeTemplate, row: int) -> RankPath:
    if row == 0:
        return ()
    parent, rank = tree.nodes[row - 1]
    return (*rank_path(tree, parent), rank)


if __name__ == "__main__":
    main()
