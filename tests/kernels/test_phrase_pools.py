"""The kernels of the phrase pool give what the torch functions give that they are twins of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_recycle.core import reference
from vllm_recycle.core.operations import PhraseOperations
from vllm_recycle.core.phrase_pool import PhrasePool
from vllm_recycle.kernels.cpu import calls
from vllm_recycle.kernels.triton import operations as triton_operations
from vllm_recycle.kernels.triton.ouroboros import phrase_pool

CPU, CUDA = "cpu", "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 4

pools = pytest.mark.parametrize(
    ("operations", "device"), [(calls, CPU), (triton_operations, CUDA)], ids=["c++", "triton"]
)


@st.composite
def batches(draw):
    """Sizes of a pool, and phrases to insert: token, phrase, and the one that it replaces."""
    per_token, length = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    # Few tokens, so that phrases come again and places run out; now and then one has a gap.
    phrase = st.lists(st.sampled_from([0, 1, 1, 1, 2, -1]), min_size=length, max_size=length)
    one = st.tuples(st.integers(-1, VOCAB - 1), phrase, phrase)
    batch = st.lists(one, min_size=1, max_size=12)
    return per_token, length, draw(st.lists(st.tuples(batch, st.booleans()), max_size=4))


def columns(batch: list[tuple], device: str) -> list[torch.Tensor]:
    return [torch.tensor(column, device=device) for column in zip(*batch, strict=True)]


def make_pools(per_token: int, length: int, device: str) -> list[PhrasePool]:
    return [PhrasePool(VOCAB, per_token=per_token, length=length, device=device) for _ in range(2)]


@pools
@settings(max_examples=60, deadline=None)
@given(steps=batches())
def test_any_batches_leave_the_same_pool(operations: PhraseOperations, device, steps):
    per_token, length, steps = steps
    expected, got = make_pools(per_token, length, device)
    for batch, replaces in steps:
        token_ids, phrases, replaced = columns(batch, device)
        replaced = replaced if replaces else None
        for pool, kernels in ((expected, reference), (got, operations)):
            kernels.insert_phrases(pool.table, token_ids, phrases, replaced=replaced)
        assert got.phrases.equal(expected.phrases)


@pools
def test_phrases_of_one_token_far_apart_are_inserted_in_order(
    operations: PhraseOperations, device, monkeypatch
):
    monkeypatch.setattr(phrase_pool, "PHRASES", 16)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(-1, VOCAB, (100,), generator=generator).to(device)
    # As they come from a window: not contiguous.
    phrases, replaced = torch.randint(0, 5, (2, 3, 100), generator=generator).to(device).mT
    expected, got = make_pools(6, 3, device)
    for pool, kernels in ((expected, reference), (got, operations)):
        kernels.insert_phrases(pool.table, token_ids, phrases)
        kernels.insert_phrases(pool.table, token_ids.flip(0), phrases.flip(0), replaced=replaced)
    assert got.phrases.equal(expected.phrases)
    assert got.num_phrases > 6


@pools
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_newest_are_the_same(operations: PhraseOperations, device, count):
    pool, _ = make_pools(3, 5, device)
    batch = [(0, [1] * 5, [0] * 5), (2, [2] * 5, [0] * 5), (2, [3] * 5, [0] * 5)]
    token_ids, phrases, _ = columns(batch, device)
    reference.insert_phrases(pool.table, token_ids, phrases)
    # What is behind the tokens' rows is nobody's.
    pool.table[-1] = 7
    # Not contiguous either.
    wanted = torch.tensor([[0, 2], [-1, 3], [2, 1]], device=device).T
    expected = reference.newest_phrases(pool.table, wanted, count)
    got = operations.newest_phrases(pool.table, wanted, count)
    assert got.dtype == torch.int64
    assert got.equal(expected)


@pools
def test_an_empty_batch_changes_nothing(operations: PhraseOperations, device):
    pool, before = make_pools(2, 3, device)
    nobody = torch.empty(0, dtype=torch.int64, device=device)
    operations.insert_phrases(pool.table, nobody, nobody.view(0, 3))
    assert pool.table.equal(before.table)
    assert operations.newest_phrases(pool.table, nobody, 2).shape == (0, 2, 3)
