"""How often each node of a large candidate tree is accepted, and the best tree of each size.

    python examples/benchmarks/measure_tree.py --model DIR --prompts FILE.jsonl... --save tree.json

Runs the prompts greedily through vLLM with 255 candidate nodes, counts at which nodes the walk
passes, and writes the most frequent ones, best first, as a template: every prefix is then the best
tree of its size. A node is never more frequent than its parent, so parents come first. The shipped
`default` tree was made this way (its file has the conditions).
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import tempfile
from collections import Counter
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the walk is watched in this process

from vllm import LLM, SamplingParams

from vllm_recycle.core.tree import MAX_NODES, TreeTemplate, from_rank_paths

RankPath = tuple[int, ...]
# A guess at how likely each rank is the token that comes, only to choose the candidates.
RANK_WEIGHTS = (0.55, 0.13, 0.07, 0.045, 0.03, 0.022, 0.018, 0.015)
FIRST_RANK_AGAIN = 1.15  # text that repeats itself goes on repeating
MAX_DEPTH = 14


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-nodes", type=int, default=80)
    parser.add_argument("--save", type=Path, required=True)
    args = parser.parse_args()

    candidates = from_rank_paths(candidate_paths(MAX_NODES - 1), name="candidates")
    share: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        candidates.save(Path(folder) / "candidates.json")
        method = {"method": "token_recycling", "tree": f"{folder}/candidates.json"}
        llm = LLM(
            args.model,
            dtype="float32",
            max_num_seqs=1,
            kv_cache_memory_bytes=2**28,
            speculative_config={**method, "budget_share": 1.0},
        )
    for path in args.prompts:
        passed, steps = count(llm, read(path), args.max_tokens)
        print(f"{path}: {1 + passed.total() / steps:.3f} tokens a step in {steps} steps")
        for row, number in passed.items():  # each file counts the same
            share[row] += number / steps / len(args.prompts)
    order = sorted(share, key=lambda row: (-share[row], row))[: args.num_nodes]
    provenance = {
        "order": "best first",
        "model": args.model,
        "prompts": list(map(str, args.prompts)),
    }
    paths = [rank_path(candidates, row) for row in order]
    from_rank_paths(paths, name=args.save.stem, provenance=provenance).save(args.save)
    sizes = [size for size in (8, 15, 23, 31, 47, 63, 80) if size <= len(order)]
    expected = {size: round(1 + sum(share[row] for row in order[:size]), 3) for size in sizes}
    print(json.dumps({"expected_accepted_tokens_by_nodes": expected, "tree": str(args.save)}))


def candidate_paths(count: int) -> list[RankPath]:
    """The likeliest rank paths by `RANK_WEIGHTS`, likeliest first."""
    heap: list[tuple[float, RankPath]] = [(-1.0, ())]
    found: list[RankPath] = []
    while len(found) < count:
        score, path = heapq.heappop(heap)
        if path:
            found.append(path)
        for rank, weight in enumerate(RANK_WEIGHTS) if len(path) < MAX_DEPTH else ():
            again = FIRST_RANK_AGAIN if path and not any((*path, rank)) else 1.0
            heapq.heappush(heap, (score * weight * again, (*path, rank)))
    return found


def count(llm: LLM, prompts: list[str], max_tokens: int) -> tuple[Counter[int], int]:
    """How often the walk passed each row, and the number of walks of trees."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    sample, passed, steps = runner._sample, Counter(), 0

    def watch(logits, metadata):
        nonlocal steps
        output = sample(logits, metadata)
        if len(runner.trees.tree_rows):
            steps += 1
            row = 0
            for token_id in output.sampled_token_ids[0].tolist():
                children = [child for child in runner.tree.children[row].tolist() if child > 0]
                drafts = runner.trees.drafts[0]
                row = next((child for child in children if drafts[child - 1] == token_id), 0)
                if not row:
                    break
                passed[row] += 1
        return output

    runner._sample = watch
    for prompt in prompts:
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    runner._sample = sample
    return passed, steps


def rank_path(tree: TreeTemplate, row: int) -> RankPath:
    return tuple(tree.ranks[step].item() for step in tree.paths[row].tolist() if step > 0)


def read(path: Path) -> list[str]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row.get("prompt") or row["turns"][0] for row in rows]


if __name__ == "__main__":
    main()
