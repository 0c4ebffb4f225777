"""The phrase pool: against one made of lists, phrase by phrase."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import THOROUGH
from vllm_recycle.core.paper.phrase_pool import PhrasePool

VOCAB, PER_TOKEN, LENGTH = 5, 3, 2

token = st.integers(-1, VOCAB - 1)
# Few tokens, so that phrases come again and places run out; now and then one has a gap.
phrase = st.lists(st.sampled_from([0, 1, 1, 2, 2, -1]), min_size=LENGTH, max_size=LENGTH)
batches = st.lists(st.lists(st.tuples(token, phrase), max_size=12), max_size=4)


def insert_by_hand(pool: list[list[tuple[int, ...]]], token_id: int, phrase: list[int]) -> None:
    if token_id < 0 or min(phrase) < 0:
        return
    known = [other for other in pool[token_id] if other != tuple(phrase)]
    pool[token_id] = [*known, tuple(phrase)][-PER_TOKEN:]


def make_pool(inserted: list[tuple[int, list[int]]] = ()) -> PhrasePool:
    pool = PhrasePool(VOCAB, per_token=PER_TOKEN, length=LENGTH)
    insert(pool, inserted)
    return pool


def insert(pool: PhrasePool, batch: list[tuple[int, list[int]]]) -> None:
    token_ids = torch.tensor([token_id for token_id, _ in batch], dtype=torch.int64)
    phrases = torch.tensor([phrase for _, phrase in batch], dtype=torch.int64)
    pool.insert(token_ids, phrases.view(-1, LENGTH))


@THOROUGH
@given(batches=batches, count=st.integers(1, PER_TOKEN), data=st.data())
def test_a_batch_is_inserted_as_if_one_by_one_and_the_newest_come_first(batches, count, data):
    pool, expected = make_pool(), [[] for _ in range(VOCAB)]
    for batch in batches:
        if batch and data.draw(st.booleans()):
            replaced = [data.draw(phrase) for _ in batch]
            token_ids, phrases = map(torch.tensor, zip(*batch, strict=True))
            pool.insert(token_ids, phrases, replaced=torch.tensor(replaced))
            # They are forgotten before the new ones come.
            for (token_id, new), old in zip(batch, replaced, strict=True):
                if token_id >= 0 and min(new) >= 0:
                    known = expected[token_id]
                    expected[token_id] = [other for other in known if other != tuple(old)]
        else:
            insert(pool, batch)
        for token_id, new in batch:
            insert_by_hand(expected, token_id, new)
        assert pool.num_phrases == sum(map(len, expected))
    gaps = [(-1,) * LENGTH] * PER_TOKEN
    found = [[tuple(one) for one in row] for row in pool.phrases.tolist()]
    assert found == [(gaps + known)[-PER_TOKEN:] for known in expected]
    newest = pool.newest(torch.arange(-1, VOCAB), count).tolist()
    found = [[tuple(one) for one in row] for row in newest]
    assert found == [(known[::-1] + gaps)[:count] for known in ([], *expected)]


def test_a_saved_pool_is_loaded_as_it_was_and_forgotten(tmp_path):
    pool, loaded = make_pool([(4, [0, 1]), (4, [0, 2]), (1, [3, 3])]), make_pool([(2, [1, 1])])
    pool.save(tmp_path / "pool", pool.form("f"))
    loaded.replace(loaded.read(tmp_path / "pool", loaded.form("f")))
    assert loaded.phrases.equal(pool.phrases)
    loaded.clear()
    assert loaded.num_phrases == 0


@pytest.mark.parametrize(
    ("sizes", "fingerprint", "row", "message"),
    [
        ({}, "g", None, "fingerprint is g, expected f"),
        ({"per_token": 2}, "f", None, "per_token is 2, expected 3"),
        ({"length": 4}, "f", None, "length is 4, expected 2"),
        ({}, "f", [[0, 1], [-1, -1], [0, 1]], "it has phrases with gaps"),
        ({}, "f", [[-1, -1], [-1, -1], [0, -1]], "it has phrases with gaps"),
    ],
)
def test_another_pool_and_one_with_gaps_are_refused(tmp_path, sizes, fingerprint, row, message):
    saved = PhrasePool(VOCAB, **{"per_token": PER_TOKEN, "length": LENGTH, **sizes})
    if row:
        saved.phrases[3] = torch.tensor(row)
    saved.save(tmp_path / "pool", saved.form(fingerprint))
    pool = make_pool([(0, [2, 2])])
    with pytest.raises(ValueError, match=f"state file .*: {message}"):
        pool.read(tmp_path / "pool", pool.form("f"))
    assert pool.num_phrases == 1


def test_phrases_of_another_pool_are_taken_for_tokens_that_have_none():
    ours, theirs = make_pool([(0, [1, 1])]), make_pool([(0, [2, 2]), (1, [1, 2]), (1, [2, 1])])
    assert all(ours.merge(theirs.contents()))
    assert ours.phrases.equal(make_pool([(0, [1, 1]), (1, [1, 2]), (1, [2, 1])]).phrases)
    ours.validate(ours.contents())
