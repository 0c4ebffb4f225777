"""Offline batch inference with Token Recycling or Ouroboros: vLLM's `LLM`, and one argument.

    python examples/offline_batch.py
    python examples/offline_batch.py --draft-model examples/models/draft
    python examples/offline_batch.py --model DIR --num-prompts 16 --max-tokens 128

Needs vLLM and this package installed; prints each output, and what speculation accepted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm import LLM, SamplingParams

EXAMPLES = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(EXAMPLES / "models/target"))
    parser.add_argument("--draft-model", help="draft with this model, by Ouroboros")
    parser.add_argument("--prompts", type=Path, default=EXAMPLES / "prompts/gsm8k.jsonl")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    lines = args.prompts.read_text(encoding="utf-8").split("\n")
    prompts = [json.loads(line)["prompt"] for line in lines[: args.num_prompts] if line]
    method: dict[str, object] = {"method": "token_recycling"}
    if args.draft_model:
        method = {"method": "ouroboros", "model": args.draft_model}
    llm = LLM(
        args.model,
        speculative_config=method,
        max_num_seqs=8,
        kv_cache_memory_bytes=2**30,  # by default most of the memory
        disable_log_stats=False,  # for get_metrics()
    )
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    for output in llm.generate(prompts, params):
        print(f"{output.prompt[:60]!r}... -> {output.outputs[0].text!r}")

    counters = {metric.name: metric for metric in llm.get_metrics()}
    num_drafts = counters["vllm:spec_decode_num_drafts"].value
    num_accepted = counters["vllm:spec_decode_num_accepted_tokens"].value
    print(f"{num_drafts} trees verified, {num_accepted} of their tokens accepted")
    print(f"mean accepted tokens: {1 + num_accepted / max(1, num_drafts):.2f} a step")


if __name__ == "__main__":
    main()
