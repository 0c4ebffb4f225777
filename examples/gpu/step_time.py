"""Time of vLLM's decode step over rows and batch size: without drafts, with a chain, with trees.

    python examples/gpu/step_time.py --json step_time.json --profile

Needs this package installed beside vLLM, and a GPU. The model has the shape of a real one and
random weights, which take the same time; trees are filled with random tokens, of which next to none
is accepted, so that contexts grow alike. Configurations run in processes of their own
(`step_time_engine`), one after another, in rounds that each begin with another one; one that fails
ends the run. What comes out, step time by rows and batch, is what verifying trees costs. `--smoke`
runs a tiny model for a few steps, without a GPU too: then times mean nothing, and `ngram` stands
for `ngram_gpu`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import marks
from step_time_engine import HAS_GPU, PROFILED, WARM_UP, Task

from vllm_recycle.cli.bench.driver import child_environment, rotate
from vllm_recycle.cli.bench.report import origin
from vllm_recycle.core.tree import load_tree

ENGINE = Path(__file__).with_name("step_time_engine.py")
CHAIN = 5  # drafts
PREFILL_TOKENS = 8192  # of a step, beside the rows of all trees
PLAIN_LIMIT, GAP_LIMIT_MS = 1.15, 0.2
LOG_LINES = 25
SMOKE = {"model_shape": "tiny", "context": 24, "batch": (1, 2), "rows": (8,)}
SMOKE |= {"steps": 6, "passes": 1, "repeats": 1}
SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)
SHAPES = {
    "llama-3-8b": (128_256, 4096, 14336, 32, 32, 8, False),
    "llama-3.2-1b": (128_256, 2048, 8192, 16, 32, 8, True),
    "tiny": (64, 64, 128, 2, 2, 1, False),
}
DEFINITIONS = {
    "rows": "of a request in a step: the root and the nodes of its tree; 1 without drafts",
    "rows_scheduled": "the same as the scheduler gave them, median over the timed steps",
    "step_ms": "median over the passes of a pass's median time from one result to the next, which "
    "an engine that schedules ahead gives once a step too",
    "mean_ms": "median over the passes of a pass's mean",
    "p10_ms, p90_ms": "of all timed steps of all passes",
    "ratio": "step_ms / step_ms without drafts at the same batch",
    "tokens_per_step": "emitted tokens of a request in a step; near 1, since drafts are random",
    "context": "mean tokens of a request in the middle of the timed steps",
    "largest_gap_ms": "longest time without a kernel, a copy or a fill on the GPU in the profiled "
    "steps, and what came before and after it",
    "idle_share": "of the profiled steps' time, without any of these",
}


@dataclass(frozen=True, slots=True)
class Configuration:
    name: str
    rows: int  # of a request
    most_tokens: int  # that a step can yield
    speculative: dict[str, Any] | None


def main() -> None:
    args = parse_arguments()
    report = {"conditions": conditions(args)}
    replies: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        write_model(args.model_shape, Path(folder))
        for turn in range(args.repeats):
            for one in rotate(args.configurations, turn):
                start = time.perf_counter()
                task = make_task(args, one, folder, last=turn == args.repeats - 1)
                replies[one.name].append(run_child(task, one.name, Path(folder) / "reply.json"))
                seconds = time.perf_counter() - start
                print(f"{one.name}, {turn + 1}/{args.repeats}: {seconds:.0f} s", file=sys.stderr)
                report |= summarize(args, replies)
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(report)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="write the result to this file")
    parser.add_argument("--model-shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--context", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--batch", type=integers, default="1,4,16,64", help="default: %(default)s")
    parser.add_argument("--rows", type=integers, default="16,32,64,80", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=64, help="timed steps of a pass")
    parser.add_argument("--passes", type=int, default=3, help="of a process, for each batch")
    parser.add_argument("--repeats", type=int, default=2, help="rounds of processes")
    parser.add_argument("--profile", action="store_true", help="look for idle gaps on the GPU")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, a few steps, once")
    parser.add_argument("--only", help="some configurations alone, as plain,chain,tree-80")
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(SMOKE)
    elif not HAS_GPU:
        parser.error("no GPU: --smoke runs without one")
    most = load_tree("default").num_nodes + 1
    if not all(2 <= rows <= most for rows in args.rows):
        parser.error(f"--rows: got {args.rows}, expected 2 to {most}, which the default tree has")
    known = {one.name: one for one in configurations(args.rows)}
    names = args.only.split(",") if args.only else list(known)
    if not set(names) <= set(known):
        parser.error(f"--only: got {args.only}, expected some of {','.join(known)}")
    args.configurations = [known[name] for name in names]
    return args


def integers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",")}))


def configurations(tree_rows: Sequence[int]) -> Iterator[Configuration]:
    yield Configuration("plain", 1, 1, None)
    chain = {"method": "ngram_gpu" if HAS_GPU else "ngram", "num_speculative_tokens": CHAIN}
    chain |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    yield Configuration("chain", CHAIN + 1, CHAIN + 1, chain)
    for rows in tree_rows:
        nodes = rows - 1
        tree: dict[str, Any] = {
            "method": "token_recycling",
            "tree": "default",
            "max_nodes": nodes,
            # The same at every batch, whatever share of the step it takes.
            "num_speculative_tokens_per_batch_size": [(1, 1 << 20, nodes)],
            "budget_share": 1.0,
        }
        if not HAS_GPU:
            tree["row_cost"] = 0  # else a price would leave out most of the rows
        depth = load_tree("default").prefix(nodes).depth
        yield Configuration(f"tree-{rows}", rows, depth + 1, tree)
        yield Configuration(f"grown-{rows}", rows, rows, tree | {"tree": "dynamic"})


def write_model(shape: str, folder: Path) -> None:
    config = {
        **dict(zip(SHAPE, SHAPES[shape], strict=True)),
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 131_072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "dtype": "bfloat16" if HAS_GPU else "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


def make_task(args: argparse.Namespace, one: Configuration, folder: str, *, last: bool) -> Task:
    """The same limits for all configurations, wide enough that no step is cut."""
    batch, rows = max(args.batch), max(one.rows for one in args.configurations)
    prompt_steps = -(-batch * args.context // PREFILL_TOKENS)
    # Between the first and the last step of a pass, those in flight and those of prompts included.
    steps = prompt_steps + WARM_UP + args.steps + PROFILED + 4
    most_tokens = max(one.most_tokens for one in args.configurations)
    engine = {
        "model": folder,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "seed": 0,
        "max_model_len": args.context + steps * most_tokens + rows,
        "max_num_seqs": batch,
        "max_num_batched_tokens": PREFILL_TOKENS + batch * rows,
        "enable_prefix_caching": False,
        "speculative_config": one.speculative,
    }
    if HAS_GPU:
        # A graph for every step that is timed; without trees none is larger than its step.
        sizes = [size * one.rows for size in args.batch]
        engine["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        engine["async_scheduling"] = True
    else:
        engine |= {"enforce_eager": True, "kv_cache_memory_bytes": 2**26}
    trace = None
    if args.profile and last:
        trace = f"{args.json.with_suffix('').resolve()}-{one.name}.trace.json.gz"
    return Task(engine, args.context, args.batch, args.steps, args.passes, trace)


def run_child(task: Task, name: str, reply: Path) -> dict[str, Any]:
    """Run one configuration in a process of its own; if it fails, exit with what it wrote last."""
    # -P: with this folder on its path, `kernels.py` would be the package that transformers knows.
    command = [sys.executable, "-P", ENGINE, json.dumps(asdict(task)), reply]
    child = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # The engine in the child itself, which looks into it.
        env=child_environment(task.engine["speculative_config"])
        | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        check=False,
    )
    if child.returncode:
        last = child.stdout.splitlines()[-LOG_LINES:]
        sys.exit(
            "\n".join([*last, f"{name}: exit status {child.returncode}, its last lines above"])
        )
    return json.loads(reply.read_text())


def summarize(args: argparse.Namespace, replies: dict[str, list[dict]]) -> dict[str, Any]:
    passes = {
        name: [one for reply in several for one in reply["passes"]]
        for name, several in replies.items()
    }
    results = [
        {"name": one.name, "rows": one.rows, **summarize_passes(batch, passes[one.name])}
        for one, batch in itertools.product(args.configurations, args.batch)
        if one.name in passes
    ]
    plain = {row["batch"]: row["step_ms"] for row in results if row["name"] == "plain"}
    for row in results:
        row["ratio"] = row["step_ms"] / plain[row["batch"]] if plain else None
    profiles = {
        name: one["profile"]
        for name, several in passes.items()
        for one in several
        if one["profile"]
    }
    return {
        "engines": {name: several[0]["engine"] for name, several in replies.items()},
        "results": results,
        "profiles": profiles,
        "marks": marks.judge(reached(results, profiles), judged=not args.smoke),
    }


def summarize_passes(batch: int, passes: list[dict[str, Any]]) -> dict[str, Any]:
    passes = [one for one in passes if one["batch"] == batch]
    medians = [statistics.median(one["step_ms"]) for one in passes]
    every = [ms for one in passes for ms in one["step_ms"]]
    p10, *_, p90 = statistics.quantiles(every, n=10, method="inclusive")
    return {
        "batch": batch,
        "rows_scheduled": statistics.median(one["rows_scheduled"] for one in passes),
        "requests_scheduled": min(one["requests_scheduled"] for one in passes),
        "step_ms": statistics.median(medians),
        "mean_ms": statistics.median(statistics.mean(one["step_ms"]) for one in passes),
        "p10_ms": p10,
        "p90_ms": p90,
        "pass_medians_ms": medians,
        "tokens_per_step": statistics.mean(one["tokens_per_step"] for one in passes),
        "context": statistics.mean(one["context"] for one in passes),
    }


def reached(results: list[dict], profiles: dict[str, dict]) -> Iterator[tuple[str, float, float]]:
    """Every mark, its limit, and what trees do."""
    trees = ("tree", "grown")
    single = [row for row in results if row["name"].startswith(trees) and row["batch"] == 1]
    if single and single[0]["ratio"] is not None:
        largest = max(single, key=lambda row: row["rows"])
        yield f"step of {largest['rows']} rows / plain step, batch 1", PLAIN_LIMIT, largest["ratio"]
    for name, profile in profiles.items():
        if name.startswith(trees) and profile["largest_gap_ms"] is not None:
            yield f"largest idle gap, {name}, ms", GAP_LIMIT_MS, profile["largest_gap_ms"]


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    options = ("model_shape", "context", "steps", "passes", "repeats")
    found = {
        **{name: getattr(args, name) for name in options},
        "shape": dict(zip(SHAPE, SHAPES[args.model_shape], strict=True)),
        "weights": "random (load_format dummy)",
        "sampling": "greedy, ignore_eos",
        "warm_up_steps": WARM_UP,
        "tree": "default",
        "speculative_configs": {one.name: one.speculative for one in args.configurations},
        **origin(),
        "definitions": DEFINITIONS,
    }
    if args.smoke:
        found["times"] = "mean nothing: a tiny model, to see that everything runs"
    return found


def table(report: dict[str, Any]) -> Iterator[str]:
    found, engine = report["conditions"], next(iter(report["engines"].values()))
    versions = ", ".join(f"{name} {number}" for name, number in engine["versions"].items())
    yield f"{found['model_shape']}, context {found['context']}, {engine['device']}, {versions}"
    if "times" in found:
        yield "times mean nothing"
    yield ""
    yield "name      batch  rows  scheduled   step ms    p10    p90  / plain  tokens/step  context"
    for row in report["results"]:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        yield (
            "{name:<9} {batch:5} {rows:5} {rows_scheduled:10.1f} {step_ms:9.3f} {p10_ms:6.2f} "
            "{p90_ms:6.2f} {0:>8} {tokens_per_step:12.2f} {context:8.0f}".format(ratio, **row)
        )
        if (row["requests_scheduled"], row["rows_scheduled"]) != (row["batch"], row["rows"]):
            yield "  not what was asked for: {requests_scheduled} requests scheduled".format(**row)
    for name, profile in report["profiles"].items():
        if profile["largest_gap_ms"] is not None:
            yield (
                "{0}: largest gap {largest_gap_ms:.3f} ms, after {gap_after:.50}, idle "
                "{idle_share:.1%}".format(name, **profile)
            )
    yield ""
    yield from marks.lines(report["marks"])


if __name__ == "__main__":
    main()
