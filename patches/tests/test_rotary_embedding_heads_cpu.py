# SPDX-License-Identifier: Apache-2.0
"""For `tests/kernels/core/` of vLLM: MLA gives the rotary embedding one dimension more."""

from __future__ import annotations

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

NUM_TOKENS, NUM_HEADS, ROTARY_DIM = 7, 4, 16


@pytest.fixture
def rotary_embedding():
    with set_current_vllm_config(VllmConfig()):
        yield RotaryEmbedding(
            head_size=ROTARY_DIM,
            rotary_dim=ROTARY_DIM,
            max_position_embeddings=64,
            base=10000,
            is_neox_style=False,
            dtype=torch.float32,
        )


@pytest.mark.parametrize("has_key", [True, False])
def test_each_head_is_rotated_by_the_position_of_its_token(rotary_embedding, has_key):
    torch.manual_seed(0)
    positions = torch.arange(3, 3 + NUM_TOKENS)
    query = torch.randn(NUM_TOKENS, NUM_HEADS, ROTARY_DIM)
    key = torch.randn(NUM_TOKENS, 1, ROTARY_DIM) if has_key else None
    flat_key = None if key is None else key.flatten(1).clone()
    expected = rotary_embedding.forward_cpu(positions, query.flatten(1).clone(), flat_key)
    given_key = None if key is None else key.clone()
    rotated = rotary_embedding.forward_cpu(positions, query.clone(), given_key)
    torch.testing.assert_close(rotated[0], expected[0].view_as(query))
    if key is not None:
        torch.testing.assert_close(rotated[1], expected[1].view_as(key))


def test_keys_that_are_a_part_of_wider_rows_are_rotated_in_place(rotary_embedding):
    torch.manual_seed(0)
    positions = torch.arange(NUM_TOKENS)
    rows = torch.randn(NUM_TOKENS, 32 + ROTARY_DIM)
    key = rows[:, 32:].unsqueeze(1)  # [tokens, 1, rotary]
    query = torch.randn(NUM_TOKENS, NUM_HEADS, ROTARY_DIM)
    flat = rotary_embedding.forward_cpu(
        positions, query.flatten(1).clone(), key.flatten(1).contiguous()
    )
    _, rotated = rotary_embedding.forward_cpu(positions, query, key)
    torch.testing.assert_close(rotated, flat[1].view_as(key))
