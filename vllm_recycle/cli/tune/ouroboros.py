"""The heuristic search of Ouroboros (arXiv 2402.13720, Algorithm 1), by wall clock.

Starting from the middle of each range, the best gamma is chosen, then the best window, then the
best phrase length. The candidates of a stage are measured side by side, each in a process of its
own and a part of the prompts at a time; the first part is not timed, it fills the pool, and no
timed part was seen before. K, the branches, stays at its default, the paper's 3, unless it is
given, and there are as many guesses as the window has columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from vllm_recycle.cli import UsageError
from vllm_recycle.cli.bench import driver
from vllm_recycle.cli.bench.ablation import ouroboros_options
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.bench.report import DISTURBED
from vllm_recycle.cli.tune.state import State

Config = dict[str, Any]
COUNTS = ("tokens", "wall_s", "steps", "accepted_tokens", "draft_rounds", "draft_forwards")


def search(plan: Plan, state: State, fixed: Config, ranges: Mapping[str, Sequence[int]]) -> Config:
    """The best configuration found.

    Args:
        plan: of the run, without methods.
        state: what was measured before; gets what is measured now.
        fixed: keys of every candidate.
        ranges: the keys to choose, in this order, and the values of each.

    Raises:
        UsageError: no candidate of a stage is legal.
    """
    chosen = {key: values[(len(values) - 1) // 2] for key, values in ranges.items()}
    passes = sum(map(len, ranges.values())) * plan.repeats
    with tqdm(total=passes, disable=None, unit="pass", leave=False) as progress:
        for key, values in ranges.items():
            candidates = {value: _candidate(fixed, chosen | {key: value}) for value in values}
            legal = _legal(candidates)
            if len(legal) == 1:  # nothing to choose
                (chosen[key],) = legal
                progress.update(len(values) * plan.repeats)
                continue
            progress.update((len(values) - len(legal)) * plan.repeats)
            methods = {f"{key}-{value}": config for value, config in legal.items()}
            _measure(dataclasses.replace(plan, methods=methods), state, key, progress)
            found = {v: _totals(state.of(stage=key, config=legal[v])) for v in legal}
            chosen[key] = max(found, key=lambda value: _speed(found[value]))
            for value, totals in found.items():
                mark = ", best" if value == chosen[key] else ""
                tqdm.write(f"{key} {value}: {_describe(totals)}{mark}")
    others = max((one["others_cpu_share"] for one in state.measurements), default=0.0)
    if others > DISTURBED:
        print(f"disturbed: others used up to {others:.0%} of the CPUs in the timed passes")
    return _candidate(fixed, chosen)


def _candidate(fixed: Config, chosen: Mapping[str, int]) -> Config:
    return {**fixed, "guesses": fixed.get("guesses", chosen["window"]), **chosen}


def _legal(candidates: Mapping[int, Config]) -> dict[int, Config]:
    """The candidates that the method accepts."""
    legal = {}
    for value, config in candidates.items():
        try:
            ouroboros_options(config)
            legal[value] = config
        except ValueError as error:
            refusal = str(error)
            tqdm.write(f"left out: {refusal}")
    if not legal:
        raise UsageError(f"no candidate can be run: {refusal}")
    return legal


def _measure(plan: Plan, state: State, stage: str, progress: tqdm) -> None:
    """Measure what the state lacks of the methods of a plan."""
    done = {name: len(state.of(stage=stage, config=plan.methods[name])) for name in plan.methods}
    progress.update(sum(done.values()))
    missing = {name: config for name, config in plan.methods.items() if done[name] < plan.repeats}
    for part in driver.parts(dataclasses.replace(plan, methods=missing)):
        with driver.children(part) as running:
            for name, child in running.items():
                progress.set_description(f"load {name}")
                driver.load(plan, child, plan.methods[name])
                # Those of the passes that are done already too: the pool is to have seen them.
                before = driver.pass_arguments(plan, 1, done[name])
                child.ask("run", **before | {"start": 0})
            for turn in range(plan.repeats):
                for name in driver.rotate(list(running), turn):
                    if turn < done[name]:
                        continue
                    progress.set_description(f"{name}, {turn + 1}/{plan.repeats}")
                    reply = running[name].ask("run", **driver.pass_arguments(plan, 1, turn + 1))
                    figures = {key: reply[key] for key in (*COUNTS, "others_cpu_share")}
                    state.add(stage=stage, config=plan.methods[name], **figures)
                    progress.update()


def _totals(measurements: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: sum(one[key] for one in measurements) for key in COUNTS}


def _speed(totals: Mapping[str, float]) -> float:
    return totals["tokens"] / totals["wall_s"]


def _describe(totals: Mapping[str, float]) -> str:
    accepted = 1 + totals["accepted_tokens"] / max(1, totals["steps"])
    forwards = totals["draft_forwards"] / max(1, totals["draft_rounds"])
    return f"{_speed(totals):.1f} tokens/s, {accepted:.2f} accepted, {forwards:.2f} draft forwards"
