"""Device time of the Triton kernels of a tree step, beside references and the machine's limits.

    python examples/gpu/kernels.py --json kernels.json

Needs a GPU with 24 GB, torch, Triton, NumPy and safetensors; neither vLLM nor an installation of
this package. First each kernel is compared with its reference on the inputs that it is timed with,
random ones of one seed, and a mismatch ends the run; then it is timed (`kernel_timing`). `--smoke`
runs all at tiny sizes, where there is no GPU in Triton's interpreter: then times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import marks
import torch
from kernel_attention import BLOCK_SIZE, AttentionCase, Heads, measure_attention
from kernel_step import StepCase, measure_step
from kernel_timing import DTYPE, HAS_GPU, L2_BYTES, ROUNDS, Peaks, measure_peaks

HEADS = (Heads("Llama-3-8B", 32, 8, 128), Heads("Llama-3-70B, TP 4", 16, 2, 128))
TINY = Heads("tiny", 4, 2, 16)
TINY_STEP = {
    **{"vocab": 48, "k": 2, "max_num_reqs": 4, "slots": 256, "text": 40, "words": 4},
    **{"layers": 2, "kv_heads": 2, "head_size": 16},
}
ROWS = 81
CONTEXTS = (512, 4096, 32768)
BATCHES = (1, 8, 32)
FEWER_ROWS = (16, 32, 64)  # at batch 1 and the middle context
CHAIN_LIMIT, COPY_LIMIT, STEP_LIMIT_US = 1.15, 2.0, 150.0
DEFINITIONS = {
    "us": "median over the rounds of microseconds a call in CUDA graphs, which are replayed in "
    "turn, the gap to the next launch included; p10_us and p90_us the same",
    "L2": "before each call the cache is filled with something else; what that takes is subtracted",
    "tree, chain": "our attention with the shipped tree, and with a chain of as many rows, which "
    "is causal verification",
    "sdpa": "torch's scaled_dot_product_attention on dense keys and values with an additive mask; "
    "the heads that share a key are folded into rows, so that nothing is expanded",
    "unified": "vLLM's unified_attention with the tree as qq_bias",
    "copy": "a device-to-device copy of the keys and values: it reads and writes their bytes, so "
    "that half of it is to read them once",
    "floor_us": "the larger of bytes, each once, over the copy bandwidth, and flops over the rate "
    "of the matrix product; for the other kernels bytes alone",
    "host_us": "median wall time to enqueue the launches, outside graphs; the device is idle",
    "together": "place, top_k, walk, compact, learn, grow in one graph, as in a step",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="write all numbers to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument(
        "--commit",
        default=printed("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"),
        help="of this checkout, where there is no git to ask",
    )
    args = parser.parse_args()
    if not HAS_GPU and not args.smoke:
        parser.error("no GPU: --smoke runs without one, in Triton's interpreter")
    torch.manual_seed(0)
    report = {"conditions": conditions(args), "attention": [], "steps": []}
    with torch.inference_mode():
        peaks = measure_peaks()
        report["peaks"] = asdict(peaks)
        for part, measured in measurements(peaks, smoke=args.smoke):
            report[part].append(measured)
            write(args.json, report)  # what is there if a later part fails
    report["marks"] = marks.judge(reached(report), judged=not args.smoke)
    write(args.json, report)
    print("\n".join(table(report)))


def write(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n")


def measurements(peaks: Peaks, *, smoke: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    if smoke:
        attention = [
            AttentionCase(TINY, *sizes) for sizes in ((13, 20, 1), (13, 20, 2), (5, 20, 1))
        ]
        steps = [StepCase(batch, rows=13, **TINY_STEP) for batch in (1, 2)]
    else:
        fewer = [(rows, CONTEXTS[1], 1) for rows in FEWER_ROWS]
        sizes = [*itertools.product([ROWS], CONTEXTS, BATCHES), *fewer]
        attention = [AttentionCase(heads, *one) for heads in HEADS for one in sizes]
        steps = [StepCase(batch, ROWS) for batch in BATCHES]
    for case in attention:
        yield "attention", measure_attention(case, peaks)
    for case in steps:
        yield "steps", measure_step(case, peaks)


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    state = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
    found = {
        "device": torch.cuda.get_device_name() if HAS_GPU else "none: Triton's interpreter",
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "vllm": version("vllm") if find_spec("vllm") is not None else None,
        "l2_bytes": L2_BYTES,
        "gpu_state": printed("nvidia-smi", f"--query-gpu={state}", "--format=csv"),
        "dtype": str(DTYPE),
        "kv_layout": f"[blocks, {BLOCK_SIZE}, kv_heads, 2 * head_size] in memory",
        "tree": "default for attention, grown for steps",
        "scope": "sequence",
        "rounds": ROUNDS,
        "commit": args.commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "definitions": DEFINITIONS,
    }
    if args.smoke:
        found["times"] = "mean nothing: tiny sizes, to see that everything runs"
    return found


def printed(*command: str) -> str | None:
    """What a command prints; None where there is none or it fails."""
    here = Path(__file__).parent
    try:
        run = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def reached(report: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Every mark, its limit, and what the kernels do."""
    rows = max(row["rows"] for row in report["attention"])
    full = [row for row in report["attention"] if row["rows"] == rows]
    context = max(row["context"] for row in full)
    single = [row for row in full if row["context"] == context and row["batch"] == 1]
    first = report["steps"][0]["times"]
    return [
        (
            f"attention / chain, {rows} rows, worst",
            CHAIN_LIMIT,
            max(us(row, "tree") / us(row, "chain") for row in full),
        ),
        (
            f"attention / copy, context {context}, batch 1, worst",
            COPY_LIMIT,
            max(us(row, "tree") / us(row, "copy") for row in single),
        ),
        ("kernels of a step beside attention, batch 1, us", STEP_LIMIT_US, first["together"]["us"]),
    ]


def us(row: dict[str, Any], name: str) -> float | None:
    return row["times"].get(name, {}).get("us")


def table(report: dict[str, Any]) -> Iterator[str]:
    yield "{device}, torch {torch}, triton {triton}".format_map(report["conditions"])
    yield "{copy_tb_per_s:.2f} TB/s copied, {product_tflops:.0f} TFLOP/s".format_map(
        report["peaks"]
    )
    if "times" in report["conditions"]:
        yield "times mean nothing"
    names = ("tree", "chain", "sdpa", "unified", "copy")
    heads = " ".join(f"{name:>8}" for name in (*names, "floor"))
    yield f"\n{'attention, us':<18} rows context batch {heads}  tree/floor"
    for row in report["attention"]:
        times = [*(us(row, name) for name in names), row["floor_us"]]
        yield (
            "{heads:<18} {rows:4} {context:7} {batch:5} ".format_map(row)
            + " ".join(cell(time, 8) for time in times)
            + f" {times[0] / times[-1]:11.2f}"
        )
    for step in report["steps"]:
        yield f"\nstep, batch {step['batch']}     us    floor  to enqueue"
        for name, host in step["host_us"].items():
            times = us(step, name), step["floor_us"].get(name)
            yield f"  {name:<9} " + " ".join(cell(time, 8) for time in times) + cell(host, 12)
    yield ""
    yield from marks.lines(report["marks"])


def cell(time: float | None, width: int) -> str:
    return f"{'-' if time is None else f'{time:.1f}':>{width}}"


if __name__ == "__main__":
    main()
