"""Which tests say nothing of a version of vLLM: what it lacks, or does wrong without us too."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import get_args

import vllm
from packaging.version import Version
from vllm.config.speculative import SpeculativeMethod

from vllm_recycle.integration.versions import FEATURES

# By what is missing, if it is: parts of the names of tests.
_LACKS = {
    "the version that is locked": (
        Version(vllm.__version__).base_version != Version(version("vllm")).base_version,
        ("test_patches.py", "test_every_name_is_in_the_installed_vllm", "test_every_parser_has"),
    ),
    "outputs without the tokens behind a stop string": (
        not FEATURES.trims_surplus_tokens,
        (
            "test_tokens_behind_a_stop_string_are_not_counted",
            "test_the_histogram_of_accepted_tokens_has_each_request_once",
            r"test_metrics_of_a_request\[.* the",
        ),
    ),
    "convolutions in float32, and of any width": (
        not FEATURES.trims_surplus_tokens,
        ("test_states_are_those_of_plain_decoding", "test_models_that_an_engine_.*its states are"),
    ),
    "W8A8 that rounds as it is told to, and parsers in Rust": (
        not FEATURES.trims_surplus_tokens,
        ("test_what_is_other_about_a_model_matters", r"plain_decoding\[tool-minimax_m3"),
    ),
    "kernels of draft models, and of `ngram` in an interpreter, for a CPU": (
        not FEATURES.cpu_runs_heads,
        (r"test_hosted_trunks.py::test_outputs_are_vllms", "test_methods_are_measured_side_by"),
    ),
    "attention sinks in float32 on a CPU": (not FEATURES.cpu_runs_heads, (r"equals_vllm\[sinks",)),
    "sums in float32 in today's order": (
        not FEATURES.cpu_runs_heads,
        (r"test_a_row_has_the_bits.*\[vec(16)?-float32",),
    ),
    "the configuration of other outputs": (
        not FEATURES.aux_outputs,
        (r"test_every_refusal_names_its_flag\[enable_return_routed_experts",),
    ),
    "Medusa": ("medusa" not in get_args(SpeculativeMethod), ("test_outputs_are_vllms.*medusa",)),
}


def reason_to_leave_out(test: str) -> str | None:
    """Why a test is left out, None where it is run."""
    for lack, (is_lacking, names) in _LACKS.items():
        if is_lacking and any(re.search(name, test) for name in names):
            return f"vLLM {vllm.__version__} has not: {lack}"
    return None
