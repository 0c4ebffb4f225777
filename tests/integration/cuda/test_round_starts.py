"""A round begins with what a plain loop gives."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from vllm_recycle.integration.cuda.ouroboros.round_starts import PAD_SLOT_ID, RoundStart

HEAD, BLOCK_SIZE, MAX_NUM_REQS, NUM_BLOCKS = 7, 4, 5, 300


def requests(missing: list[int]) -> dict[str, torch.Tensor]:
    """Texts of some hundred tokens."""
    torch.manual_seed(0)
    num_cached = torch.tensor([0, 3, 255, 1090, 17])
    return {
        "texts": torch.randint(1000, (MAX_NUM_REQS, 1200)).int(),
        "last_token_ids": torch.randint(1000, (MAX_NUM_REQS, 1)),
        "num_computed": (num_cached + torch.tensor(missing)).int(),
        "num_cached": num_cached,
        "block_tables": torch.randint(9999, (MAX_NUM_REQS, NUM_BLOCKS)).int(),
    }


def begin_in_torch(start: RoundStart, idx_mapping: torch.Tensor, **given: torch.Tensor) -> None:
    for row, state in enumerate(idx_mapping.tolist()):
        cached = int(given["num_cached"][state])
        computed = min(int(given["num_computed"][state]), cached + HEAD - 1)
        tokens, blocks = torch.arange(cached, computed), given["block_tables"][state].long()
        start.idx_mapping[row], start.num_head[row] = state, len(tokens)
        start.last_token_ids[row] = given["last_token_ids"][state, 0]
        start.num_cached[row] = cached
        start.heads[row], start.slot_mapping[row] = 0, PAD_SLOT_ID
        if len(tokens):
            start.heads[row, -len(tokens) :] = given["texts"][state, cached:computed]
            slots = blocks[tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE
            start.slot_mapping[row, -len(tokens) :] = slots
        start.block_table[row] = blocks
        given["num_cached"][state] = computed


def begin_round(
    start, idx_mapping, *, texts, last_token_ids, num_computed, num_cached, block_tables
):
    """The package's, by what it reads of vLLM's states and of the cache."""
    states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=texts),
        last_sampled_tokens=last_token_ids,
        num_computed_tokens=SimpleNamespace(gpu=num_computed),
    )
    cache = SimpleNamespace(num_cached=num_cached, blocks=SimpleNamespace(block_size=BLOCK_SIZE))
    start.begin(idx_mapping, states, cache, block_tables)


@pytest.mark.parametrize("missing", [[1, 1, 1, 1, 1], [0, 6, 2, 3, 5], [7, 1, 6, 99, 1]])
def test_a_round_begins_as_in_a_plain_loop(missing):
    idx_mapping = torch.tensor([3, 0, 2, 1])
    found = []
    for begin in (begin_in_torch, begin_round):
        start = RoundStart.make(MAX_NUM_REQS, HEAD, NUM_BLOCKS, torch.device("cpu"))
        given = requests(missing)
        begin(start.first(len(idx_mapping)), idx_mapping, **given)
        found.append([*(getattr(start, field.name) for field in fields(start)), *given.values()])
    for expected, got in zip(*found, strict=True):
        assert got.equal(expected)
