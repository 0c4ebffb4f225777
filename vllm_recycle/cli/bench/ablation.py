"""`bench --ablation`: what each component of Ouroboros gives (Table 4 of its paper), and alone.

First each line adds a component to the line before it, from vLLM's `draft_model` with as many
draft tokens to the whole method; then each component is missing from the whole. Passes have
prompts of their own: on prompts that it has seen, reusing history would be reciting.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from vllm_recycle.cli import UsageError
from vllm_recycle.cli.bench.methods import (
    A_DRAFT_MODEL,
    DRAFT_MODEL,
    Methods,
    drafting_methods,
    given_methods,
)
from vllm_recycle.integration.options import OUROBOROS, OuroborosOptions

# What switches off each component, in the order of the table.
COMPONENTS: dict[str, dict[str, Any]] = {
    "phrases": {"guesses": 0},  # the window goes on to fill the pool
    "lengthening": {"branches": 0},
    "verification": {"harvest_trunk": False, "harvest_branches": False},
    "history": {"scope": "request"},
}
# Without history, what remains is the line before the whole.
MISSING: dict[str, dict[str, Any]] = {
    "phrases": COMPONENTS["phrases"],
    "lengthening": COMPONENTS["lengthening"],
    "trunk-harvest": {"harvest_trunk": False},
    "branch-harvest": {"harvest_branches": False},
}


def choose_ablation(args: argparse.Namespace) -> tuple[Methods, dict[str, str]]:
    """The methods of an ablation, and which of them each is compared with.

    Raises:
        UsageError: for other methods, or an Ouroboros that cannot be run.
    """
    for option in ("methods", "tree", "scope", "draft_tokens"):
        if getattr(args, option):
            raise UsageError(
                f"--ablation does not go with --{option.replace('_', '-')}: it has its own methods"
            )
    given = given_methods(args)
    if unused := given.keys() - {OUROBOROS}:
        raise UsageError(
            f"--speculative-config {min(unused)}: expected the name ouroboros with --ablation"
        )
    whole = (drafting_methods(args) | given).get(OUROBOROS)
    if whole is None or whole.get("method") != OUROBOROS:
        raise UsageError(
            f"--ablation needs {A_DRAFT_MODEL}, or --speculative-config "
            '\'ouroboros={"method": "ouroboros", ...}\''
        )
    try:
        return ablation(whole)
    except ValueError as error:
        raise UsageError(f"--speculative-config ouroboros: {error}") from error


def ablation(whole: dict[str, Any]) -> tuple[Methods, dict[str, str]]:
    """The same, of a speculative configuration of the whole method."""
    gamma = ouroboros_options(whole).gamma
    # Each line starts with an empty pool.
    whole = whole | {"gamma": gamma, "pool_file": None, "save_every": None}
    draft_model = {"method": DRAFT_MODEL, "model": whole["model"], "num_speculative_tokens": gamma}
    methods: Methods = {"none": None, DRAFT_MODEL: draft_model}
    gain_over = {DRAFT_MODEL: "none"}
    last = DRAFT_MODEL
    for number, component in enumerate(COMPONENTS, start=1):
        config = dict(whole)
        for off in list(COMPONENTS.values())[number:]:
            config |= off
        name = f"with-{component}"
        methods[name], gain_over[name], last = config, last, name
    for component, off in MISSING.items():
        name = f"without-{component}"
        methods[name], gain_over[name] = whole | off, last
    return methods, gain_over


def ouroboros_options(config: dict[str, Any]) -> OuroborosOptions:
    """The options that a speculative configuration of Ouroboros asks for.

    Raises:
        ValueError: naming the key, what was given and what is accepted.
    """
    given = {key: value for key, value in config.items() if key != "method"}
    return OuroborosOptions.parse(given, on_gpu=torch.cuda.is_available())
