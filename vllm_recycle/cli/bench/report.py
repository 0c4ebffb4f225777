"""What a benchmark run reports: one JSON object."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_recycle import __version__
from vllm_recycle.cli.bench.driver import Measurement, Reply
from vllm_recycle.cli.bench.methods import DRAFT_MODEL, SpeculativeConfig, needs_plugin
from vllm_recycle.cli.bench.plan import Plan

Result = dict[str, Any]
BASELINE = "none"
DRAFTED, ACCEPTED = "draft_tokens", "accepted_tokens"
COUNTS = ("tokens", "steps", "engine_steps")
VARIABLES = re.compile("VLLM_.*|OMP_NUM_THREADS|LD_PRELOAD")
PRIVATE_VARIABLES = re.compile("VLLM_.*_(KEY|HOST|IPS?)")


def make_report(plan: Plan, measurement: Measurement) -> dict[str, Any]:
    """The JSON object: conditions, then one result per concurrency and method."""
    keys = [(name, level) for level in plan.concurrency for name in plan.methods]
    results = [_result(plan, measurement, *key) for key in keys]
    return {"conditions": _conditions(plan, measurement), "results": results}


def _result(plan: Plan, measurement: Measurement, name: str, concurrency: int) -> Result:
    passes, first_pass = measurement.passes[name, concurrency], measurement.first_passes[name]
    baseline_passes = measurement.passes.get((BASELINE, concurrency), [])
    pairs = [*zip(passes, baseline_passes, strict=bool(baseline_passes))]
    speedups = [_speed(reply) / _speed(baseline) for reply, baseline in pairs]
    # Outputs are compared in all passes at this concurrency, the first one too.
    if pairs and concurrency == plan.first_pass_concurrency:
        pairs.append((first_pass, measurement.first_passes[BASELINE]))
    matches = [
        output == baseline_output
        for reply, baseline in pairs
        for output, baseline_output in zip(reply["outputs"], baseline["outputs"], strict=True)
    ]
    equal_share = sum(matches) / len(matches) if matches else None
    categories = _categories(plan, passes, concurrency)
    for category, baseline in _categories(plan, baseline_passes, concurrency).items():
        figures = categories[category]
        figures["speedup"] = figures["tokens_per_s"] / baseline["tokens_per_s"]
    return {
        "method": name,
        "concurrency": concurrency,
        "tokens_per_s": statistics.median(map(_speed, passes)),
        "speedup": _median(speedups),
        "speedups": speedups,
        "mean_accepted_tokens": _median(per_step(reply, ACCEPTED) for reply in passes),
        "mean_accepted_tokens_first_pass": per_step(first_pass, ACCEPTED),
        "requests": passes[0]["requests"],
        **{key: statistics.median_low(reply[key] for reply in passes) for key in COUNTS},
        "step_ms": _median(reply["step_ms"] for reply in passes),
        "rows_per_step": _median(per_step(reply, DRAFTED) for reply in passes),
        "draft_forwards_per_round": _draft_forwards(plan.methods[name], passes),
        "outputs_equal": None if equal_share is None else equal_share == 1,
        "equal_share": equal_share,
        "categories": categories,
        **{key: [reply[key] for reply in passes] for key in ("wall_s", "others_cpu_share")},
        "first_pass": {
            "concurrency": plan.first_pass_concurrency,
            **{key: first_pass[key] for key in ("tokens", "steps", "wall_s")},
        },
    }


def _categories(plan: Plan, passes: Sequence[Reply], concurrency: int) -> dict[str, Result]:
    """The figures of each category over all passes, in the order of the prompts."""
    sums: dict[str, Counter[str]] = {str(prompt.category): Counter() for prompt in plan.prompts}
    for turn, reply in enumerate(passes if plan.by_category else ()):
        start, stop = plan.prompts_of(plan.pass_number(turn, concurrency))
        for prompt, counts in zip(plan.prompts[start:stop], reply["prompts"], strict=True):
            sums[str(prompt.category)].update(counts, runs=1)
    return {
        name: {
            "runs": int(total["runs"]),
            "tokens": total["tokens"],
            "tokens_per_s": total["tokens"] / total["seconds"],
            "speedup": None,
            "mean_accepted_tokens": per_step(total, ACCEPTED),
            "rows_per_step": per_step(total, DRAFTED),
        }
        for name, total in sums.items()
        if total["runs"]
    }


def _speed(reply: Reply) -> float:
    return reply["tokens"] / reply["wall_s"]


def per_step(counts: Mapping[str, Any], key: str) -> float | None:
    """1 + the draft tokens that a step had on average, or those of them that were accepted."""
    return 1 + counts[key] / counts["steps"] if counts["steps"] else None


def _draft_forwards(config: SpeculativeConfig, passes: Sequence[Reply]) -> float | None:
    if config and config.get("method") == DRAFT_MODEL:
        return config.get("num_speculative_tokens")
    return _median(
        reply["draft_forwards"] / reply["draft_rounds"] if reply.get("draft_rounds") else None
        for reply in passes
    )


def _median(values: Any) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def _conditions(plan: Plan, measurement: Measurement) -> dict[str, Any]:
    engines = {
        name: {key: value for key, value in engine.items() if key != "versions"}
        for name, engine in measurement.engines.items()
    }
    engine = next(iter(measurement.engines.values()))
    provenance = origin(**engine["versions"])
    provenance["hardware"] = {"device": engine["device"], **provenance["hardware"]}
    return {
        **plan.conditions(),
        "dtype": engine["dtype"],
        "methods_without_plugin": [
            name for name, config in plan.methods.items() if not needs_plugin(config)
        ],
        "engines": engines,
        **provenance,
        "definitions": json.loads((Path(__file__).parent / "definitions.json").read_text("utf-8")),
    }


def origin(**versions: str) -> dict[str, Any]:
    """What made a result: `versions`, `hardware`, `environment`, `commit`, `command` and `date`.

    `versions` are those of packages other than ours.
    """
    own_versions = {"vllm_recycle": __version__, "python": platform.python_version()}
    return {
        "versions": own_versions | versions,
        "hardware": hardware(),
        "environment": environment(),
        "commit": commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
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


def environment() -> dict[str, str]:
    """Variables of vLLM and of its threads that are set, without paths, keys and addresses."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if VARIABLES.fullmatch(name)
        and not PRIVATE_VARIABLES.fullmatch(name)
        and os.sep not in value
    }


def commit() -> str | None:
    """The commit of the checkout this package runs from, with `-dirty` where files differ."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    folder = Path(__file__).parent
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
