"""Copies on the device are those of the reference, and the surer trunk of each request is taken."""

from __future__ import annotations

import pytest
import torch

from vllm_recycle.core.adjacency import NUM_CLASSES, Ends
from vllm_recycle.core.copies import Copies, draft_copies, learn_copies
from vllm_recycle.core.grow import Trunks
from vllm_recycle.kernels.triton import copies as device_copies
from vllm_recycle.kernels.triton.copies import DeviceCopies
from vllm_recycle.kernels.triton.matrix.find import Texts
from vllm_recycle.kernels.triton.trunks import choose_trunks

MAX_NUM_REQS, WIDTH, LENGTH = 5, 400, 21


@pytest.mark.parametrize("kinds", [1, 2, 5, 40])
@pytest.mark.parametrize("counts", [True, False])
def test_copies_equal_the_reference(kinds, counts, monkeypatch):
    monkeypatch.setattr(device_copies, "BLOCK", 64)  # several of a text
    draw = torch.Generator().manual_seed(kinds)
    classes = torch.arange(MAX_NUM_REQS) % NUM_CLASSES
    token_ids = torch.randint(kinds, (MAX_NUM_REQS, WIDTH), generator=draw).int()
    token_ids[:, 100:200] = token_ids[:, :100]
    token_ids[:, 203:300] = token_ids[:, 3:100]  # nearer to the last copy than the newest place
    token_ids[0, 40] = -1
    lengths = torch.tensor([0, 1, 150, 180, 210]).int()
    reference, ours = (Copies(classes, LENGTH, counts=counts) for _ in range(2))
    reference.acceptance.counts[:, :, 5] = 1999.0  # soon halved
    ours.acceptance.counts.copy_(reference.acceptance.counts)
    device, texts = DeviceCopies.empty(ours), Texts(token_ids, lengths)
    device.begin(torch.arange(MAX_NUM_REQS))
    for _ in range(12):
        idx_mapping = torch.randperm(MAX_NUM_REQS, generator=draw)[:3]
        ends = Ends(token_ids[idx_mapping], (lengths[idx_mapping] - 1).tolist())
        expected = draft_copies(reference, idx_mapping, ends)
        trunks = device.draft(idx_mapping.int(), texts)
        assert trunks.token_ids[idx_mapping].equal(expected.token_ids)
        torch.testing.assert_close(trunks.chances[idx_mapping], expected.chances.float())
        assert ours.stands[idx_mapping].equal(reference.stands[idx_mapping])
        assert ours.acceptance.counts.equal(reference.acceptance.counts)
        sizes = torch.randint(1, 9, (3,), generator=draw).tolist()
        rows = zip(idx_mapping.tolist(), sizes, strict=True)
        follows = torch.full((3, 8), -1)
        for b, (index, size) in enumerate(rows):
            first = int(lengths[index])
            follows[b, :size] = token_ids[index, first : first + size]
            lengths[index] += size
        learn_copies(reference, idx_mapping, ends, follows)
        # On the device it is learnt with the next draft.
        device.draft(idx_mapping.int(), texts)
        draft_copies(
            reference,
            idx_mapping,
            Ends(token_ids[idx_mapping], (lengths[idx_mapping] - 1).tolist()),
        )


def test_the_surer_trunk_is_taken():
    draw = torch.Generator().manual_seed(3)
    copies = Trunks(
        torch.randint(9, (4, 6, 1), generator=draw), torch.rand(4, 6, 1, generator=draw)
    )
    heads = Trunks(torch.randint(9, (4, 2, 3), generator=draw), torch.rand(4, 2, 3, generator=draw))
    heads.token_ids[1] = -1  # left out, with the chances of the trunk before
    chances = heads.chances.where(heads.token_ids >= 0, 0.0)
    idx_mapping = torch.tensor([3, 1, 0])
    surer, expected = (
        choose_trunks(idx_mapping, copies, heads),
        copies.surer(heads._replace(chances=chances)),
    )
    is_copy = copies.promises >= heads._replace(chances=chances).promises
    assert is_copy[idx_mapping].any()
    assert not is_copy[idx_mapping].all()
    for values, expected_values in zip(surer, expected, strict=True):
        assert values[idx_mapping].equal(expected_values[idx_mapping])
