"""What a benchmark run reports: one JSON object, a table for people, a plot."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_recycle import __version__
from vllm_recycle.cli.bench.driver import Measurement, Reply
from vllm_recycle.cli.bench.methods import DRAFT_MODEL, SpeculativeConfig, needs_plugin
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.bench.profile import FORWARD, OWN, TREE_ATTENTION

Row = dict[str, Any]
BASELINE = "none"
DISTURBED = 0.05  # share of the CPUs that others used, above which the table says so
THREAD_VARIABLES = ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "LD_PRELOAD")
DEFINITIONS = {
    "tokens_per_s": "emitted tokens / wall time of a pass over the prompts, prompt steps included; "
    "median over the repeats, as every figure here unless it says otherwise",
    "speedup": "tokens_per_s / tokens_per_s of the method none at the same concurrency",
    "mean_accepted_tokens": "1 + accepted draft tokens / steps, tokens a target call, as the "
    "papers count: the free token of a step is in, and so are tokens behind an end of text or "
    "--max-tokens; a step is one request in one engine step, without the step that ends its prompt",
    "mean_accepted_tokens_first_pass": "the same in the first pass of the process over the prompts "
    "(first_pass.concurrency in flight), which nothing precedes and which is not timed",
    "step_ms": "median time of the engine steps that hold no prompt",
    "draft_tokens_per_step": "draft tokens verified / steps, as vLLM counts them",
    "draft_forwards_per_round": "forwards of the draft model / drafts made, counted once for each "
    "request that takes part; vLLM's draft_model drafts each of its tokens by one forward",
    "gain": "tokens_per_s / tokens_per_s of the method gain_over at the same concurrency",
    "fresh_prompts": "whether each pass has prompts of its own, so that nothing has seen them",
    "own_share": "of the time of these steps, in this package's runner, scheduler and worker, "
    "without attention; from a further pass with timers, as all shares",
    "attention_share": "of the time of these steps, in this package's attention",
    "outside_forward_share": "of the time of these steps, outside the target's forward pass, which "
    "is its layers, attention and logits",
    "others_cpu_share": "of all CPUs during each timed pass, used by other processes; where it is "
    "not near 0, the figures are disturbed",
    "threads": "torch's own number and the variables as given; vLLM heeds "
    "VLLM_CPU_OMP_THREADS_BIND only in the processes that it starts itself, and this engine runs "
    "in the measuring process, unbound, on all cores or OMP_NUM_THREADS",
    "parts_ms": "mean time of these steps by part; the timers themselves cost a little",
    "outputs_equal": "all token ids equal those of none at the same concurrency, in every pass; "
    "certain only in float32, elsewhere near-ties fall either way",
    "equal_share": "the share of requests whose token ids are equal",
}
COLUMNS = (
    ("in flight", "concurrency", "d", 1),
    ("method", "method", "s", 1),
    ("tokens/s", "tokens_per_s", ".1f", 1),
    ("speed-up", "speedup", ".2f", 1),
    ("accepted", "mean_accepted_tokens", ".3f", 1),
    ("first pass", "mean_accepted_tokens_first_pass", ".3f", 1),
    ("steps", "steps", "d", 1),
    ("step ms", "step_ms", ".2f", 1),
    ("draft forwards", "draft_forwards_per_round", ".2f", 1),
    ("own %", "own_share", ".1f", 100),
    ("outside forward %", "outside_forward_share", ".1f", 100),
    ("equal %", "equal_share", ".1f", 100),
    ("gain", "gain", ".2f", 1),
    ("over", "gain_over", "s", 1),
)


def make_report(plan: Plan, measurement: Measurement) -> dict[str, Any]:
    """The JSON object: conditions, then one result a concurrency and method."""
    keys = [(name, level) for level in plan.concurrency for name in plan.methods]
    rows = [_row(plan, measurement, name, level) for name, level in keys]
    speeds = {(row["method"], row["concurrency"]): row["tokens_per_s"] for row in rows}
    for row in rows:
        for key, other in (("speedup", BASELINE), ("gain", row["gain_over"])):
            base = speeds.get((other, row["concurrency"]))
            row[key] = row["tokens_per_s"] / base if base else None
    return {"conditions": _conditions(plan, measurement), "results": rows}


def format_table(report: dict[str, Any]) -> str:
    """A few lines of conditions and the results, one line each; columns without any value go."""
    conditions = report["conditions"]
    lines = [
        f"{conditions['model']}, {conditions['num_prompts']} prompts of {conditions['prompts']}, "
        f"{conditions['max_tokens']} new tokens at most, greedy, {conditions['dtype']}, "
        f"median of {conditions['repeats']}"
        + (", prompts of its own for each pass" if conditions["fresh_prompts"] else ""),
        ", ".join(f"{name} {number}" for name, number in conditions["versions"].items()),
        "{device}, {cpu}, {cores} cores, {memory_gib} GiB".format_map(conditions["hardware"])
        + f", {conditions['threads']['torch']} threads",
        "",
    ]
    rows = report["results"]
    columns = [column for column in COLUMNS if any(row[column[1]] is not None for row in rows)]
    cells = [[title for title, *_ in columns]]
    for row in rows:
        values = [(row[key], form, scale) for _, key, form, scale in columns]
        cells.append(["-" if v is None else format(v * scale, form) for v, form, scale in values])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  ".join(padded))
    timed = max(max(row["others_cpu_share"]) for row in rows)
    profiled = max(row["others_cpu_share_profile"] or 0.0 for row in rows)
    for share, what in ((timed, "timed passes"), (profiled, "passes behind the own and outside %")):
        if share > DISTURBED:
            lines.append(f"disturbed: others used up to {share:.0%} of the CPUs in the {what}")
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the speed-up (without a baseline: tokens/s) over the requests in flight."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = report["results"]
    quantity = "speedup" if rows[0]["speedup"] is not None else "tokens_per_s"
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name in dict.fromkeys(row["method"] for row in rows):
        points = [(row["concurrency"], row[quantity]) for row in rows if row["method"] == name]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    levels = sorted({row["concurrency"] for row in rows})
    axes.set_xticks(levels, labels=map(str, levels))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("speed-up over none" if quantity == "speedup" else "tokens/s")
    axes.set_title("{model}, {dtype}".format_map(report["conditions"]))
    axes.legend()
    figure.savefig(path, dpi=150)


def _row(plan: Plan, measurement: Measurement, name: str, concurrency: int) -> Row:
    passes = measurement.passes[name, concurrency]
    first = measurement.first_passes[name]
    profile = measurement.profiles.get((name, concurrency), {})
    parts = profile.get("parts_ms", {})
    equal = _equal_share(plan, measurement, name, concurrency)
    return {
        "method": name,
        "concurrency": concurrency,
        "tokens_per_s": statistics.median(one["tokens"] / one["wall_s"] for one in passes),
        "speedup": None,
        "gain": None,
        "gain_over": plan.gain_over.get(name),
        "mean_accepted_tokens": _median(map(_mean_accepted, passes)),
        "mean_accepted_tokens_first_pass": _mean_accepted(first),
        "tokens": statistics.median_low(one["tokens"] for one in passes),
        "requests": passes[0]["requests"],
        "steps": statistics.median_low(one["steps"] for one in passes),
        "engine_steps": statistics.median_low(one["engine_steps"] for one in passes),
        "step_ms": _median(one["step_ms"] for one in passes),
        "draft_tokens_per_step": _median(
            one["draft_tokens"] / one["steps"] if one["steps"] else None for one in passes
        ),
        "draft_forwards_per_round": _draft_forwards(plan.methods[name], passes),
        **_shares(parts),
        "parts_ms": parts,
        "outputs_equal": None if equal is None else equal == 1,
        "equal_share": equal,
        "wall_s": [one["wall_s"] for one in passes],
        "others_cpu_share": [one["others_cpu_share"] for one in passes],
        "others_cpu_share_profile": profile.get("others_cpu_share"),
        "first_pass": {
            "concurrency": plan.first_pass_concurrency,
            **{key: first[key] for key in ("tokens", "steps", "wall_s")},
        },
    }


def _mean_accepted(one: Reply) -> float | None:
    return 1 + one["accepted_tokens"] / one["steps"] if one["steps"] else None


def _draft_forwards(config: SpeculativeConfig, passes: Sequence[Reply]) -> float | None:
    if config and config.get("method") == DRAFT_MODEL:
        return config.get("num_speculative_tokens")
    return _median(
        one["draft_forwards"] / one["draft_rounds"] if one.get("draft_rounds") else None
        for one in passes
    )


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _shares(parts: dict[str, float]) -> dict[str, float | None]:
    if not parts:
        return dict.fromkeys(("own_share", "attention_share", "outside_forward_share"))
    step = sum(parts.values())
    return {
        "own_share": parts.get(OWN, 0) / step,
        "attention_share": parts.get(TREE_ATTENTION, 0) / step,
        "outside_forward_share": 1 - sum(parts.get(name, 0) for name in FORWARD) / step,
    }


def _equal_share(plan: Plan, measurement: Measurement, name: str, concurrency: int) -> float | None:
    """The share of requests, over all passes at this concurrency, that equal the baseline's."""
    if BASELINE not in plan.methods:
        return None
    passes, base = (
        list(measurement.passes[method, concurrency])
        + [measurement.first_passes[method]] * (concurrency == plan.first_pass_concurrency)
        for method in (name, BASELINE)
    )
    pairs = [
        ours == theirs
        for one, other in zip(passes, base, strict=True)
        for ours, theirs in zip(one["outputs"], other["outputs"], strict=True)
    ]
    return sum(pairs) / len(pairs)


def _conditions(plan: Plan, measurement: Measurement) -> dict[str, Any]:
    engines = {
        name: {key: value for key, value in engine.items() if key != "versions"}
        for name, engine in measurement.engines.items()
    }
    first = next(iter(measurement.engines.values()))
    return {
        "model": plan.model,
        "prompts": str(plan.prompts_path),
        "num_prompts": len(plan.prompts),
        "max_tokens": plan.max_tokens,
        "ignore_eos": plan.ignore_eos,
        "sampling": "greedy",
        "dtype": first["dtype"],
        "methods": plan.methods,
        "methods_without_plugin": [
            name for name, config in plan.methods.items() if not needs_plugin(config)
        ],
        "concurrency": plan.concurrency,
        "repeats": plan.repeats,
        "fresh_prompts": plan.fresh_prompts,
        "max_engines": plan.max_engines,
        "engine_args": plan.engine_args,
        "engines": engines,
        "versions": {
            "vllm_recycle": __version__,
            **first["versions"],
            "python": platform.python_version(),
        },
        "hardware": {"device": first["device"], **hardware()},
        "threads": {
            "torch": first["torch_threads"],
            **{name: os.environ.get(name) for name in THREAD_VARIABLES},
        },
        "commit": commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "definitions": DEFINITIONS,
    }


def hardware() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines: Sequence[str] = cpuinfo.read_text().splitlines() if cpuinfo.exists() else ()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
    }


def commit() -> str | None:
    """The commit of the checkout this package runs from, with `-dirty` where files differ."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    here = Path(__file__).parent
    try:
        run = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
