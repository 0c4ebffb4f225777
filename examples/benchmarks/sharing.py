"""Who learns from whom: owners among the traffic of others, and replicas that share a folder.

    make model suffix
    python examples/benchmarks/sharing.py --model examples/models/smollm2-135m-instruct \
        --json examples/benchmarks/results/cpu-sharing.json

Tokens per call of the target, greedy, one request at a time; float32.

owners: a session asks its prompts, and asks them again; in between 100 other owners ask one each.
replicas: two engines read one half of some prompts each, and then the other half; beside them one
engine that has read all of them before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from vllm_recycle.cli.bench.prompts import read_prompts
from vllm_recycle.cli.bench.report import commit, hardware

PROMPTS = Path(__file__).parents[1] / "prompts"
TREES = {"method": "token_recycling"}
NUM_OTHERS = 100
SAVE_EVERY = 1


class Engine:
    """Answers prompts, and says how many tokens a call of the target gave."""

    def __init__(self, args: argparse.Namespace, method: dict[str, Any]) -> None:
        self.max_tokens, self.has_owners = args.max_tokens, method["method"] != "suffix"
        self.llm = LLM(
            args.model,
            speculative_config=method,
            dtype="float32",
            max_model_len=4096,
            max_num_seqs=4,
            kv_cache_memory_bytes=1 << 29,
            enable_prefix_caching=False,
            enforce_eager=True,
            per_request_spec_decode_metrics="summary",
        )

    def tokens_per_call(self, texts: Sequence[str], owners: Sequence[str | None]) -> float:
        """Of these prompts, each with an owner."""
        tokens = steps = 0
        for text, owner in zip(texts, owners, strict=True):
            extra_args = {"owner": owner} if self.has_owners else None
            params = SamplingParams(
                temperature=0, max_tokens=self.max_tokens, extra_args=extra_args
            )
            messages = [{"role": "user", "content": text}]
            [answer] = self.llm.chat(messages, params, use_tqdm=False)
            # Of the request: of several engines in a process vLLM counts those of the last.
            histogram = answer.outputs[0].spec_decode_metrics.histogram
            steps += sum(histogram)
            tokens += sum((1 + accepted) * count for accepted, count in enumerate(histogram))
        return tokens / steps

    def end(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def owners(args: argparse.Namespace) -> dict[str, Any]:
    """Of each method: the session's first and second time, without traffic in between and with."""
    session = texts_of("edits")[: args.num_prompts]
    others = [*texts_of("spec_bench"), *texts_of("gsm8k")][:NUM_OTHERS]
    names = [f"other {number}" for number in range(len(others))]
    found = {}
    for method in (TREES, {"method": "suffix"}):
        engine, rates = Engine(args, method), {}
        mine = ["session"] * len(session)
        rates["others, before the session"] = engine.tokens_per_call(others[:20], names[:20])
        rates["first"] = engine.tokens_per_call(session, mine)
        rates["again"] = engine.tokens_per_call(session, mine)
        rates["others"] = engine.tokens_per_call(others, names)
        rates["again, after others"] = engine.tokens_per_call(session, mine)
        rates["others, once more"] = engine.tokens_per_call(others[:20], names[:20])
        engine.end()
        found[method["method"]] = rates
        print("owners", method["method"], rates, flush=True)
    return found


def replicas(args: argparse.Namespace) -> dict[str, float]:
    """The second half of each of two replicas, and of one that has read both halves."""
    texts = [
        text for pair in zip(texts_of("gsm8k"), texts_of("humaneval"), strict=True) for text in pair
    ]
    halves = [texts[: args.num_prompts], texts[args.num_prompts : 2 * args.num_prompts]]
    nobody = [None] * args.num_prompts
    with tempfile.TemporaryDirectory() as folder:
        method = {**TREES, "matrix_file": folder, "save_every": SAVE_EVERY}
        both = [Engine(args, method) for _ in halves]
        cold = [one.tokens_per_call(half, nobody) for one, half in zip(both, halves, strict=True)]
        time.sleep(10 * SAVE_EVERY)
        pairs = zip(both, halves[::-1], strict=True)
        shared = [one.tokens_per_call(half, nobody) for one, half in pairs]
        for one in both:
            one.end()
    alone = Engine(args, TREES)
    for half in halves:
        alone.tokens_per_call(half, nobody)
    again = [alone.tokens_per_call(half, nobody) for half in halves]
    alone.end()
    found = {"cold": sum(cold) / 2, "read by the other": sum(shared) / 2, "one": sum(again) / 2}
    print("replicas", found, flush=True)
    return found


def texts_of(name: str) -> list[str]:
    return [prompt.turns[0] for prompt in read_prompts(PROMPTS / f"{name}.jsonl")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = {"owners": owners(args), "replicas": replicas(args)}
    if args.json:
        given = {key: str(value) for key, value in vars(args).items()}
        report |= {"arguments": given, "hardware": hardware(), "commit": commit()}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
