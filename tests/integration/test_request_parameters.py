"""What a request says of speculation: accepted, refused, or somebody else's."""

from __future__ import annotations

import pytest
from engines import TARGET
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from vllm_recycle.integration.plugin import register
from vllm_recycle.integration.requests import may_speculate


@pytest.fixture(scope="module")
def speculative_config():
    register()
    args = EngineArgs(TARGET, speculative_config={"method": "token_recycling"})
    return args.create_engine_config().speculative_config


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"speculate": "no"}, "'speculate' is 'no', expected true or false"),
        ({"speculate": 2}, "'speculate' is 2, expected true or false"),
    ],
)
def test_an_opt_out_that_is_none(extra_args, message, speculative_config):
    with pytest.raises(VLLMValidationError, match=f"extra_args: {message}"):
        SamplingParams(extra_args=extra_args)._validate_spec_decode(speculative_config)


@pytest.mark.parametrize(
    ("speculate", "expected"), [(True, True), (1, True), (None, True), (False, False), (0, False)]
)
def test_what_opts_out(speculate, expected, speculative_config):
    params = SamplingParams(extra_args={"speculate": speculate})
    params._validate_spec_decode(speculative_config)
    assert may_speculate(params) == expected


@pytest.mark.parametrize(
    "extra_args", [{"speculate": False}, {"circulate": 1, "specualte": 2, 4: 5}, {}, None]
)
def test_keys_of_others_are_left_alone(extra_args, speculative_config):
    params = SamplingParams(extra_args=extra_args, min_p=0.1)
    params._validate_spec_decode(speculative_config)


def test_other_methods_are_left_alone():
    register()
    config = {"method": "ngram", "num_speculative_tokens": 3}
    made = EngineArgs(TARGET, speculative_config=config).create_engine_config()
    params = SamplingParams(extra_args={"speculate": "no"})
    params._validate_spec_decode(made.speculative_config)
