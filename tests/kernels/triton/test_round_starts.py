"""The kernel that begins a round gives what its torch twin gives."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from tests.kernels.triton import torch_twins
from vllm_recycle.kernels.triton.ouroboros.round_starts import RoundStart, begin_round

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEAD, BLOCK_SIZE, MAX_NUM_REQS, NUM_BLOCKS = 7, 4, 5, 300


def requests(missing: list[int]) -> dict[str, torch.Tensor]:
    """Texts of some hundred tokens, the longest of which have more blocks than a program copies."""
    generator = torch.Generator().manual_seed(0)
    num_cached = torch.tensor([0, 3, 255, 1090, 17])
    made = {
        "texts": torch.randint(0, 1000, (MAX_NUM_REQS, 1200), generator=generator),
        "last_token_ids": torch.randint(0, 1000, (MAX_NUM_REQS, 1), generator=generator),
        "num_computed": num_cached + torch.tensor(missing),
        "num_cached": num_cached,
        "block_tables": torch.randint(0, 9999, (MAX_NUM_REQS, NUM_BLOCKS), generator=generator),
    }
    narrow = ("texts", "num_computed", "block_tables")
    return {
        name: value.to(DEVICE, torch.int32 if name in narrow else torch.int64)
        for name, value in made.items()
    }


@pytest.mark.parametrize("missing", [[1, 1, 1, 1, 1], [0, 6, 2, 3, 5], [7, 1, 6, 99, 1]])
def test_a_round_begins_as_with_the_twin(missing):
    idx_mapping = torch.tensor([3, 0, 2, 1], device=DEVICE)
    found = []
    for begin in (torch_twins.begin_round, begin_round):
        start = RoundStart.make(MAX_NUM_REQS, HEAD, NUM_BLOCKS, DEVICE)
        given = requests(missing)
        begin(start.first(len(idx_mapping)), idx_mapping, **given, block_size=BLOCK_SIZE)
        found.append([*(getattr(start, field.name) for field in fields(start)), *given.values()])
    for expected, got in zip(*found, strict=True):
        assert got.equal(expected)
    # As if for a second round.
    before, after = requests(missing)["num_cached"], given["num_cached"]
    taken = torch.tensor(missing, device=DEVICE).clamp(max=HEAD - 1)
    assert after[idx_mapping].equal((before + taken)[idx_mapping])
    assert after[4] == before[4]
