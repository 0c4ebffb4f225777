"""What a request says of speculation: accepted, refused, or somebody else's; and its holes."""

from __future__ import annotations

import pytest
import torch
from engines import TARGET
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import NewRequestData

from vllm_recycle.integration.plugin import register
from vllm_recycle.integration.requests import may_speculate, with_holes


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


def test_what_looks_back_has_no_drafts_where_paths_are_not_seen():
    params = SamplingParams(thinking_token_budget=0)
    assert may_speculate(params, sees_paths=True)
    assert not may_speculate(params, sees_paths=False)
    others = SamplingParams(repetition_penalty=1.1, bad_words=["no"])
    assert may_speculate(others, sees_paths=False)


def test_where_the_input_of_a_request_is_no_token():
    def text(*, is_encoder_decoder: bool = False) -> list[int]:
        return [*with_holes([*known, 7], request, is_encoder_decoder=is_encoder_decoder)]

    known = [5, 9, 9, 6, 9]
    request = NewRequestData("0", known, [], None, None, ([0],), 0, None)
    assert text() == [5, 9, 9, 6, 9, 7]
    images = [(1, 2), (4, 1)]
    request.mm_features = [
        MultiModalFeatureSpec(None, "image", "", PlaceholderRange(*image)) for image in images
    ]
    assert text() == [5, -1, -1, 6, -1, 7]
    assert text(is_encoder_decoder=True) == [5, 9, 9, 6, 9, 7]
    request.prompt_is_token_ids = [False] + [True] * 4
    assert text() == [-1, -1, -1, 6, -1, 7]
    request.prompt_token_ids, request.prompt_embeds = None, torch.zeros(5, 8)
    assert text() == [-1, -1, -1, -1, -1, 7]
