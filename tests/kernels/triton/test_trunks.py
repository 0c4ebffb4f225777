"""Counting what followed trunks, and the chances of new ones, equal the reference."""

from __future__ import annotations

import pytest
import torch

from vllm_recycle.core.adjacency import NUM_CLASSES
from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.trunk import CHOICES, ChoiceAcceptance
from vllm_recycle.kernels.triton.matrix.find import Texts
from vllm_recycle.kernels.triton.trunks import REQUESTS, DeviceTrunks

MAX_NUM_REQS, LENGTH, LONGEST, VOCAB = REQUESTS + 9, 5, 24, 3


@pytest.mark.parametrize("batch", [1, 3, MAX_NUM_REQS])
def test_counts_and_chances_equal_the_reference(batch):
    """Where probabilities are no numbers, too."""
    draw = torch.Generator().manual_seed(batch)

    def integers(first: int, last: int, *shape: int) -> torch.Tensor:
        return torch.randint(first, last, shape, generator=draw)

    classes = integers(0, NUM_CLASSES, MAX_NUM_REQS)
    ours, reference = ChoiceAcceptance(classes), ChoiceAcceptance(classes)
    reference.counts += 2 * integers(0, 1100, *reference.counts.shape)  # some are soon halved
    ours.counts.copy_(reference.counts)
    trunks = DeviceTrunks.empty(MAX_NUM_REQS, LENGTH, ours)
    lengths = integers(1, LONGEST, MAX_NUM_REQS).int()
    texts = Texts(integers(0, VOCAB, MAX_NUM_REQS, LONGEST + 3 * LENGTH).int(), lengths)
    for _ in range(4):
        idx_mapping = torch.randperm(MAX_NUM_REQS, generator=draw)[:batch].int()
        # As a speculator has them: by place first.
        token_ids = integers(-1, VOCAB, LENGTH, MAX_NUM_REQS, CHOICES)[:, :batch].transpose(0, 1)
        probable = torch.rand(LENGTH, MAX_NUM_REQS, CHOICES, generator=draw)[:, :batch]
        probable[torch.rand(probable.shape, generator=draw) < 0.05] = torch.nan
        drafted = Trunks(token_ids, probable.transpose(0, 1))
        trunks.take(idx_mapping, texts, drafted)
        chances = reference.chances(drafted, idx_mapping).chances
        at = idx_mapping.long()
        assert trunks.token_ids[at].equal(token_ids)
        assert trunks.probabilities[at].nan_to_num(-1).equal(drafted.chances.nan_to_num(-1))
        torch.testing.assert_close(trunks.chances[at], chances, equal_nan=True)
        began = lengths[at].long()
        lengths[at] += integers(0, LENGTH + 2, batch).int()
        trunks.count(idx_mapping, texts)
        places = began[:, None] + torch.arange(LENGTH)
        follows = texts.token_ids[at[:, None], places].long()
        reference.count(drafted, idx_mapping, follows.where(places < lengths[at, None], -1))
        assert ours.counts.equal(reference.counts)
        lengths.clamp_(max=LONGEST)
    assert not trunks.increments.any()
