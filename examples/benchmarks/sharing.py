"""Who learns from whom: owners among the traffic of others, and replicas that share a folder.

    make model suffix
    VLLM_CPU_NUM_OF_RESERVED_CPU=0 python examples/benchmarks/sharing.py \
        --model examples/models/smollm2-135m-instruct \
        --json examples/benchmarks/results/cpu-sharing.json

Tokens per call of the target, greedy, one request at a time; float32. The first token of an answer
and the call that gave it do not count. Of the last call count the tokens up to the answer's end.

owners: 20 others ask, a session asks its prompts, and asks them again; then 100 others ask one
prompt each, and the session asks again. With an owner per session, without owners, and `suffix`.
replicas: two engines read one half of some prompts each, and then the other half; beside them one
engine that has read all of them before.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vllm
from vllm import LLM, SamplingParams

from vllm_recycle.cli.bench.methods import METHODS
from vllm_recycle.cli.bench.prompts import read_prompts
from vllm_recycle.cli.bench.report import origin

PROMPTS = Path(__file__).parents[1] / "prompts"
NUM_OTHERS, NUM_BEFORE = 100, 20
DEFINITIONS = {
    "tokens": "of the answers, behind the first token of each",
    "calls": "steps of the target that gave these tokens",
    "tokens_per_call": "tokens / calls",
}
SAVE_EVERY = 1


class Engine:
    """Answers prompts, and says how many tokens the calls of the target gave."""

    def __init__(self, args: argparse.Namespace, method: dict[str, Any]) -> None:
        self.max_tokens = args.max_tokens
        self.llm = LLM(
            args.model,
            speculative_config=method,
            dtype="float32",
            max_model_len=4096,
            max_num_seqs=4,
            kv_cache_memory_bytes=1 << 29,
            enable_prefix_caching=False,
            enforce_eager=True,
        )

    def ask(self, texts: Sequence[str], owners: Sequence[str] | None = None) -> Counter[str]:
        """The `tokens` of the answers to these prompts, each by an owner, and their `calls`.

        Metrics of vLLM would not do: of several engines in a process they are those of the last.
        """
        engine, counts = self.llm.llm_engine, Counter[str]()
        for number, text in enumerate(texts):
            token_ids = self.llm.get_tokenizer().apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            [prompt] = engine.renderer.render_cmpl([{"prompt_token_ids": token_ids}])
            extra_args = {"owner": owners[number]} if owners else None
            params = SamplingParams(
                temperature=0, max_tokens=self.max_tokens, extra_args=extra_args
            )
            engine.add_request(str(number), prompt, params)
            lengths = []  # of the answer so far, by step
            while engine.has_unfinished_requests():
                lengths += [len(result.outputs[0].token_ids) for result in engine.step()]
            counts += Counter(tokens=lengths[-1] - lengths[0], calls=len(lengths) - 1)
        return counts

    def end(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def owners(args: argparse.Namespace) -> dict[str, Any]:
    """Of each method: the session's first and second time, without traffic in between and with."""
    session = texts_of("edits")[: args.num_prompts]
    others = [*texts_of("spec_bench"), *texts_of("gsm8k")][:NUM_OTHERS]
    trees, found = METHODS["token_recycling"], {}
    for name, method in (("owners", trees), ("no owners", trees), ("suffix", METHODS["suffix"])):
        engine, has_owners = Engine(args, method), name == "owners"
        mine = ["session"] * len(session) if has_owners else None
        theirs = [f"other {number}" for number in range(NUM_OTHERS)] if has_owners else None
        counts = {
            "others, before the session": engine.ask(others[:NUM_BEFORE], theirs),
            "first": engine.ask(session, mine),
            "again": engine.ask(session, mine),
            "others": engine.ask(others, theirs),
            "again, after others": engine.ask(session, mine),
            "others, once more": engine.ask(others[:NUM_BEFORE], theirs),
        }
        engine.end()
        found[name] = {when: rated(counted) for when, counted in counts.items()}
        print(name, found[name], flush=True)
    return found


def replicas(args: argparse.Namespace) -> dict[str, Any]:
    """The second half of each of two replicas, and of one that has read both halves."""
    texts = [
        text for pair in zip(texts_of("gsm8k"), texts_of("humaneval"), strict=True) for text in pair
    ]
    halves = [texts[: args.num_prompts], texts[args.num_prompts : 2 * args.num_prompts]]
    trees = METHODS["token_recycling"]
    with tempfile.TemporaryDirectory() as folder:
        method = {**trees, "matrix_file": folder, "save_every": SAVE_EVERY}
        both = [Engine(args, method) for _ in halves]
        cold = [one.ask(half) for one, half in zip(both, halves, strict=True)]
        time.sleep(10 * SAVE_EVERY)
        shared = [one.ask(half) for one, half in zip(both, halves[::-1], strict=True)]
        for one in both:
            one.end()
    alone = Engine(args, trees)
    for half in halves:
        alone.ask(half)
    again = [alone.ask(half) for half in halves]
    alone.end()
    counts = {"cold": cold, "read by the other": shared, "one": again}
    found = {when: rated(first + second) for when, (first, second) in counts.items()}
    print("replicas", found, flush=True)
    return found


def rated(counts: Counter[str]) -> dict[str, float]:
    return {**counts, "tokens_per_call": counts["tokens"] / counts["calls"]}


def texts_of(name: str) -> list[str]:
    return [prompt.turns[0] for prompt in read_prompts(PROMPTS / f"{name}.jsonl")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--num-prompts", type=int, default=8, help="of a session, of a half")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    given = {key: str(value) for key, value in vars(args).items()}
    report = {"arguments": given, "definitions": DEFINITIONS, **origin(vllm=vllm.__version__)}
    report |= {"owners": owners(args), "replicas": replicas(args)}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
