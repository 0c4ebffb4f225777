"""Tests of kernels that are compiled: on a GPU, or with `PTX_ARCH` in the interpreter of PTX.

Of what Hypothesis draws, a few examples: each set of constants is compiled. In the interpreter
(`triton/ptx/launch`) the tests of attention, which take longest, are marked `attention`.
"""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

FEW = hypothesis.settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
ATTENTION = ("test_tree_attention.py", "test_launch.py")
LEFT_OUT = {
    "test_compiles.py": "compiles in a process of its own",
    "test_the_launches_of_other_layers_are_those_that_triton_would_make": "compiles in another",
    "test_levels_end_where_none_of_the_next_could_be_among_the_nodes": "counts calls in Triton's "
    "interpreter",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "attention: with `PTX_ARCH`, launches attention")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    in_ptx = "PTX_ARCH" in os.environ
    if not (in_ptx or torch.cuda.is_available()):
        return
    for item in items:
        function = getattr(item, "function", None)
        if hypothesis.is_hypothesis_test(function):
            function._hypothesis_internal_use_settings = FEW
        if not in_ptx:
            continue
        if item.path.name in ATTENTION:
            item.add_marker("attention")
        for name in (item.path.name, getattr(function, "__name__", "")):
            if name in LEFT_OUT:
                item.add_marker(pytest.mark.skip(reason=LEFT_OUT[name]))
