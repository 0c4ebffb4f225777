"""What a request says of speculation, and its holes; `test_hints` has what is refused."""

from __future__ import annotations

import pytest
import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import NewRequestData

from vllm_recycle.integration.requests import may_speculate, with_holes


@pytest.mark.parametrize(
    ("speculate", "expected"), [(True, True), (1, True), (None, True), (False, False), (0, False)]
)
def test_what_opts_out(speculate, expected):
    assert may_speculate(SamplingParams(extra_args={"speculate": speculate})) == expected


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
