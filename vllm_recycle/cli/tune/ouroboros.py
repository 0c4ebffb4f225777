"""The sizes of Ouroboros by wall clock: Algorithm 1 of arXiv 2402.13720, and an option beyond it.

The paper's search starts from the middle of each range and chooses the best gamma, then the best
window, then the best phrase length. `max_forwards` comes before it: at the small gamma that the
paper's form wants, it has nothing to save. From then on the search goes on in two forms side by
side, with it as chosen and with the first of its range, which is the paper's form by default. The
faster of both in the last stage is the result.

The candidates of a stage are measured side by side, a part of the prompts at a time; the first part
is not timed, it fills the pool. K, the branches, stays at its default unless it is given, and there
are as many guesses as the window has columns.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_recycle.cli import RunError, UsageError
from vllm_recycle.cli.bench import driver
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.bench.progress import Progress
from vllm_recycle.cli.bench.report import ACCEPTED, per_step
from vllm_recycle.cli.bench.table import DISTURBED
from vllm_recycle.core.state_file import StateFileError, write_file
from vllm_recycle.integration.options import OuroborosOptions

Config = dict[str, Any]
Sizes = dict[str, int]
FORMAT = "vllm_recycle.tune/1"  # of the state file
BEYOND_PAPER = ("max_forwards",)  # 0: as many as gamma, as in the paper
COUNTS = ("tokens", "wall_s", "steps", "accepted_tokens", "draft_rounds", "draft_forwards")


class State:
    """Measurements so far, each written to their file as it is made, which a later run reads.

    Raises UsageError if it is no such file, or of other conditions, which are JSON values.
    """

    def __init__(self, path: Path, conditions: dict[str, Any]) -> None:
        self.path = path
        self.conditions = conditions
        self.measurements: list[dict[str, Any]] = self._read() if path.exists() else []

    def of(self, **key: Any) -> list[dict[str, Any]]:
        """The measurements with these values, in the order in which they were made."""
        return [
            one
            for one in self.measurements
            if all(one.get(name) == value for name, value in key.items())
        ]

    def add(self, **measurement: Any) -> None:
        """Keep one more measurement, in the file too; raises RunError if it cannot be written."""
        self.measurements.append(measurement)
        content: dict[str, Any] = {"format": FORMAT, "conditions": self.conditions}
        content["measurements"] = self.measurements
        try:
            write_file(self.path, f"{json.dumps(content)}\n".encode(), kind="--state")
        except StateFileError as error:
            raise RunError(str(error)) from error

    def _read(self) -> list[dict[str, Any]]:
        another = "name another with --state, or remove it"
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UsageError(f"--state {self.path} cannot be read ({error}): {another}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UsageError(f"--state {self.path} is no state of vllm-recycle tune: {another}")
        for key, expected in self.conditions.items():
            got = content["conditions"].get(key)
            if got != expected:
                raise UsageError(
                    f"--state {self.path} is of another run, {key} {got}, not {expected}: {another}"
                )
        return content["measurements"]


def search(plan: Plan, state: State, fixed: Config, ranges: Mapping[str, Sequence[int]]) -> Config:
    """The best configuration found; raises UsageError if no candidate of a stage is legal.

    `plan` has no methods; `state` has what was measured before, and gets what is measured now;
    `fixed` are keys of every candidate; `ranges` has the paper's keys in the paper's order.
    """
    start = {key: values[(len(values) - 1) // 2] for key, values in ranges.items()}
    start |= {key: ranges[key][0] for key in BEYOND_PAPER}
    forms = [start]
    for key in BEYOND_PAPER:
        forms = _stage(plan, state, fixed, key, ranges[key], forms)
    forms.append(start)
    of_paper = [key for key in ranges if key not in BEYOND_PAPER]
    # A single value is worth no stage, but one stage has to compare the forms.
    for key in [key for key in of_paper if len(ranges[key]) > 1] or of_paper[-1:]:
        forms = _stage(plan, state, fixed, key, ranges[key], forms)
    others = max((one["others_cpu_share"] for one in state.measurements), default=0.0)
    if others > DISTURBED:
        print(f"disturbed: others used up to {others:.0%} of the CPUs in the timed passes")
    return _config(fixed, forms[0])


def _stage(
    plan: Plan, state: State, fixed: Config, key: str, values: Sequence[int], forms: Sequence[Sizes]
) -> list[Sizes]:
    """Each form with its best value of a key, the fastest form first and none twice."""
    candidates = [_legal(fixed, [form | {key: value} for value in values], key) for form in forms]
    configs = {name: _config(fixed, sizes) for one in candidates for name, sizes in one.items()}
    # Where few engines are alive at once, these are at least the forms of one value.
    configs = dict(sorted(configs.items(), key=lambda item: item[1][key]))
    if len(configs) == 1:  # nothing to choose
        return list(candidates[0].values())
    _measure(dataclasses.replace(plan, methods=configs), state, key)
    found = {
        name: driver.add_up(state.of(stage=key, config=config), COUNTS)
        for name, config in configs.items()
    }
    names = sorted(configs, key=lambda name: _speed(found[name]), reverse=True)
    best = {next(name for name in names if name in one): one for one in candidates}
    for name, totals in found.items():
        print(f"{name}: {_describe(totals)}{', best' if name in best else ''}")
    return [best[name][name] for name in names if name in best]


def _config(fixed: Config, sizes: Sizes) -> Config:
    """What sizes mean: what is beyond the paper is at most gamma."""
    beyond = {key: min(sizes[key], sizes["gamma"]) for key in BEYOND_PAPER}
    beyond["max_forwards"] = beyond["max_forwards"] or sizes["gamma"]
    return {**fixed, "guesses": fixed.get("guesses", sizes["window"]), **sizes, **beyond}


def _legal(fixed: Config, candidates: Sequence[Sizes], key: str) -> dict[str, Sizes]:
    """The candidates that the method accepts, by name; one of those that mean the same."""
    legal: dict[str, Sizes] = {}
    for sizes in candidates:
        config = _config(fixed, sizes)
        shown = {key: config[key]} | {name: config[name] for name in sizes}
        try:
            given = {name: value for name, value in config.items() if name != "method"}
            OuroborosOptions.parse(given, on_gpu=torch.cuda.is_available())
        except ValueError as error:
            refusal = str(error)
            print(f"left out: {refusal}")
            continue
        legal.setdefault(", ".join(f"{name} {value}" for name, value in shown.items()), sizes)
    if not legal:
        raise UsageError(f"no candidate can be run: {refusal}")
    return legal


def _measure(plan: Plan, state: State, stage: str) -> None:
    """Measure what the state lacks of the methods of a plan."""
    done = {name: len(state.of(stage=stage, config=plan.methods[name])) for name in plan.methods}
    missing = {name: config for name, config in plan.methods.items() if done[name] < plan.repeats}
    total, before_now = len(done) * plan.repeats, sum(done.values())
    with Progress(total, unit="passes", done=before_now) as progress:
        for part in driver.parts(dataclasses.replace(plan, methods=missing)):
            with driver.children(part) as running:
                for name, child in running.items():
                    progress.begin(f"load {name}")
                    driver.load(plan, child, plan.methods[name])
                    # With the prompts of passes that are done: the pool must have seen them.
                    before = driver.pass_arguments(plan, 1, done[name])
                    child.ask("run", **before | {"start": 0})
                for turn in range(plan.repeats):
                    for name in driver.rotate(list(running), turn):
                        if turn < done[name]:
                            continue
                        progress.begin(f"{name}, {turn + 1}/{plan.repeats}")
                        reply = running[name].ask("run", **driver.pass_arguments(plan, 1, turn + 1))
                        figures = {key: reply[key] for key in (*COUNTS, "others_cpu_share")}
                        state.add(stage=stage, config=plan.methods[name], **figures)
                        progress.finish()


def _speed(totals: Mapping[str, float]) -> float:
    return totals["tokens"] / totals["wall_s"]


def _describe(totals: Mapping[str, float]) -> str:
    accepted = per_step(totals, ACCEPTED) or 1.0
    forwards = totals["draft_forwards"] / max(1, totals["draft_rounds"])
    return f"{_speed(totals):.1f} tokens/s, {accepted:.2f} accepted, {forwards:.2f} draft forwards"
