"""Decoding methods by name: vLLM's own, this package's, those of the command line."""

from __future__ import annotations

import argparse
import re
from importlib.util import find_spec
from typing import Any

from vllm_recycle.cli import UsageError
from vllm_recycle.cli.bench.arguments import json_object
from vllm_recycle.integration.options import METHODS as PLUGIN_METHODS
from vllm_recycle.integration.options import OUROBOROS, PAPER

SpeculativeConfig = dict[str, Any] | None  # None: plain decoding
Methods = dict[str, SpeculativeConfig]

DRAFT_MODEL, OUROBOROS_PAPER = "draft_model", "ouroboros-paper"
HINTS = "hints"  # with which the engine is given the hints of the prompts
METHODS: Methods = {
    "none": None,
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    },
    # The best of those tried, as for ngram: examples/benchmarks/README.md.
    "suffix": {"method": "suffix", "suffix_decoding_min_token_prob": 0.3},
    "token_recycling": {"method": "token_recycling"},
    HINTS: {"method": "token_recycling"},
    "paper-80": {"method": "token_recycling", "preset": "paper"},
}
DEFAULT_METHODS = "none,ngram,suffix,token_recycling"
DEFAULT_METHODS_WITH_DRAFT_MODEL = "none,ngram,suffix,draft_model,token_recycling,ouroboros"
DEFAULT_DRAFT_TOKENS = 2
A_DRAFT_MODEL = "--draft-model DIR, a smaller model with the same vocabulary"


def needs_plugin(config: SpeculativeConfig) -> bool:
    """All other methods run with this plugin excluded."""
    return config is not None and config.get("method") in PLUGIN_METHODS


def choose_methods(args: argparse.Namespace) -> Methods:
    """The methods of a run; raises UsageError for one that is unknown or incomplete."""
    draft_methods = _drafting_methods(args)
    own_methods = dict(map(_named_config, args.speculative_config))
    methods_by_name = METHODS | draft_methods | own_methods
    default = DEFAULT_METHODS_WITH_DRAFT_MODEL if args.draft_model else DEFAULT_METHODS
    names = [name.strip() for name in (args.methods or default).split(",")]
    has_suffix = find_spec("arctic_inference") is not None
    if not args.methods and "suffix" not in own_methods and not has_suffix:
        names.remove("suffix")
    if DRAFT_MODEL not in methods_by_name:
        kinds = [name for name in draft_methods if name.startswith(DRAFT_MODEL)]
        names = [method for name in names for method in (name == DRAFT_MODEL and kinds) or [name]]
    for name in names:
        if name not in methods_by_name:
            if name in (DRAFT_MODEL, OUROBOROS, OUROBOROS_PAPER):
                raise UsageError(f"the method {name} needs {A_DRAFT_MODEL}")
            raise UsageError(f"unknown method {name!r}, expected of {', '.join(methods_by_name)}")
    if len(set(names)) < len(names):
        raise UsageError(f"--methods {args.methods} names a method twice")
    if unused := own_methods.keys() - set(names):
        raise UsageError(
            f"--speculative-config {min(unused)} is not among --methods {args.methods or default}"
        )
    if draft_methods and not draft_methods.keys() & set(names):
        raise UsageError(
            f"--draft-model belongs to the methods {', '.join(draft_methods)}, of which none is run"
        )
    methods = {name: methods_by_name[name] for name in names}
    uses_suffix = any(config and config.get("method") == "suffix" for config in methods.values())
    if uses_suffix and not has_suffix:
        raise UsageError(
            "the method suffix needs vLLM's optional package, of which there is no wheel: "
            "`make suffix` in a checkout, or pip install arctic-inference==0.1.1"
        )
    return methods


def _drafting_methods(args: argparse.Namespace) -> Methods:
    """The methods that use the draft model, if there is one."""
    if not args.draft_model:
        if args.draft_tokens:
            raise UsageError("--draft-tokens needs --draft-model")
        return {}
    sizes = args.draft_tokens or (DEFAULT_DRAFT_TOKENS,)
    methods: Methods = {
        DRAFT_MODEL if len(sizes) == 1 else f"{DRAFT_MODEL}-{size}": {
            "method": DRAFT_MODEL,
            "model": args.draft_model,
            "num_speculative_tokens": size,
        }
        for size in sizes
    }
    config = {"method": OUROBOROS, "model": args.draft_model}
    return methods | {OUROBOROS: config, OUROBOROS_PAPER: config | {"preset": PAPER}}


def _named_config(text: str) -> tuple[str, dict[str, Any]]:
    name, separator, value = text.partition("=")
    if not separator or not re.fullmatch(r"[\w.-]+", name) or name == "none":
        raise UsageError(
            f"--speculative-config {text!r}: expected NAME=JSON, NAME of letters, digits and _.- "
            "and not `none`"
        )
    return name, json_object(value, f"--speculative-config {name}")
