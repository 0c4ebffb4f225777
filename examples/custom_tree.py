"""A draft tree of one's own: write it as JSON, look at it, decode with it.

    python examples/custom_tree.py
    python examples/custom_tree.py --output my_tree.json --model DIR

A node is the path of ranks that leads to it: (0, 2) is "the most likely successor of the last
token, then the third most likely one of that". Parents come first; a prefix of the list is what a
short token budget leaves of the tree, so put first what is accepted most often.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from vllm_recycle.cli.tree import format_tree
from vllm_recycle.core.tree import from_rank_paths

EXAMPLES = Path(__file__).parent
PATHS = [
    *[(0,), (0, 0), (1,), (0, 0, 0), (0, 1), (2,), (1, 0), (3,), (0, 0, 0, 0), (0, 0, 1)],
    *[(0, 1, 0), (0, 2), (2, 0), (1, 0, 0), (1, 1), (4,)],
]
PROMPT = "Question: A train has 4 cars with 12 seats each. How many seats are there?\nAnswer:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(EXAMPLES / "models/target"))
    parser.add_argument("--output", type=Path, default=Path("my_tree.json"))
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    tree = from_rank_paths(PATHS, name="mine", provenance={"source": "examples/custom_tree.py"})
    tree.save(args.output)
    print(format_tree(tree))

    method: dict[str, object] = {"method": "token_recycling", "tree": str(args.output)}
    if current_platform.is_cpu():
        method["row_cost"] = 0  # the whole tree in every step; without it, as much of it as pays
    llm = LLM(
        args.model,
        speculative_config=method,
        max_num_seqs=1,
        kv_cache_memory_bytes=2**30,  # by default most of the memory
        disable_log_stats=False,  # for get_metrics()
    )
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    print(PROMPT + llm.generate(PROMPT, params)[0].outputs[0].text)

    counters = {metric.name: metric for metric in llm.get_metrics()}
    num_drafts = counters["vllm:spec_decode_num_drafts"].value
    num_nodes = counters["vllm:spec_decode_num_draft_tokens"].value
    num_accepted = counters["vllm:spec_decode_num_accepted_tokens"].value
    print(f"{num_drafts} trees of at most {tree.num_nodes} nodes, {num_nodes} nodes verified")
    print(f"mean accepted tokens: {1 + num_accepted / max(1, num_drafts):.2f} a step")


if __name__ == "__main__":
    main()
