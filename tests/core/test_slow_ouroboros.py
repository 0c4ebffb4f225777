"""The slow Ouroboros: its rounds by hand, and that it decodes greedily."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.slow_ouroboros import Rows, Sequence, SlowOuroboros

VOCAB = 7


class Follower:
    """A model of which only a row's own token counts: one more, but for the exceptions."""

    def __init__(self, exceptions: dict[int, int] | None = None) -> None:
        self.exceptions = exceptions or {}

    def __call__(self, token_ids, attention_mask, position_ids):
        rows = token_ids[0].tolist()
        following = [self.exceptions.get(token, (token + 1) % 10) for token in rows]
        return SimpleNamespace(logits=torch.eye(10)[following][None])


class Reader:
    """A model that reads the last three tokens a row sees, and insists on a whole past."""

    def __init__(self, *, odd: int) -> None:
        self.odd = odd  # how often it differs from others of its kind: each so many sums

    def __call__(self, token_ids, attention_mask, position_ids):
        following = []
        for row, sees in enumerate(attention_mask[0, 0] == 0):
            position = int(position_ids[0, row])
            seen = zip(position_ids[0, sees].tolist(), token_ids[0, sees].tolist(), strict=True)
            past = sorted(seen)
            assert [place for place, _ in past] == list(range(position + 1))
            near = [token for _, token in past[-3:]]
            total = sum((place + 2) * token for place, token in enumerate(reversed(near)))
            following.append((total + (total % self.odd == 0)) % VOCAB)
        return SimpleNamespace(logits=torch.eye(VOCAB)[following][None])


def greedy(model, token_ids: list[int], count: int) -> list[int]:
    """Plain greedy decoding."""
    text = list(token_ids)
    for _ in range(count):
        text.append(Rows(text).outputs(model)[-1])
    return text[len(token_ids) :]


def plain(**options) -> dict:
    sizes = {"gamma": 4, "window": 1, "guesses": 2, "phrase_length": 4, "branches": 2}
    return {**sizes, **options}


def test_rounds_by_hand():
    # The target differs from the draft behind 4 alone.
    slow = SlowOuroboros(Follower({4: 7}), Follower(), **plain())
    sequence = slow.begin([1, 2, 3])
    first = slow.step(sequence)
    assert dataclasses.astuple(first) == (4, [4, 5, 6, 7], [], [4, 7])
    # Of the window, and behind the mistake (6, 7, 8).
    assert slow.pool == {4: [(2, 3, 4)], 5: [(3, 4, 5), (6, 7, 8)], 6: [(4, 5, 6)]}
    assert sequence == Sequence([1, 2, 3, 4, 7], [[5], [6]])

    second = slow.step(sequence)
    assert dataclasses.astuple(second) == (4, [8, 9, 0, 1], [], [8, 9, 0, 1, 2])
    assert slow.pool[7] == [(5, 6, 7), (8, 9, 0)]
    assert slow.pool[9] == [(7, 8, 9), (0, 1, 2)]

    third = slow.step(sequence)
    # Four forwards for 3, 4, 5 and (6, 7, 8) with its bonus, cut; 6 has a phrase to go on with.
    assert dataclasses.astuple(third) == (4, [3, 4, 5, 6], [(4, 5, 6)], [3, 4, 7])
    assert sequence == Sequence([1, 2, 3, 4, 7, 8, 9, 0, 1, 2, 3, 4, 7], [[3], [4]])


@pytest.mark.parametrize(
    ("phrases", "new_tokens", "corrected"),
    [
        # Right to 7, and not at all; a third was not tried.
        ([(1, 1, 1), (0, 0, 0), (6, 7, 9)], [6, 7, 8], [(1, 1, 1), (6, 1, 1), (6, 7, 8)]),
        # The older one is right to its end.
        ([(6, 7, 8), (9, 9, 9)], [6, 7, 8, 9], [(6, 7, 8), (6, 0, 0)]),
        # One is corrected to what the other was.
        ([(0, 0, 0), (6, 1, 1)], [6, 7], [(6, 1, 1), (6, 7, 2)]),
    ],
)
@pytest.mark.parametrize("harvest", [True, False])
def test_branches_are_replaced_by_what_the_target_said(phrases, new_tokens, corrected, harvest):
    options = plain(gamma=2, guesses=3, harvest_branches=harvest)
    slow = SlowOuroboros(Follower(), Follower(), **options)
    slow.pool = {5: list(phrases)}
    [result] = slow.generate([1, 2, 3], 1)
    tried = phrases[: -options["branches"] - 1 : -1]
    assert dataclasses.astuple(result) == (2, [4, 5], tried, [4, 5, *new_tokens])
    assert slow.pool[5] == (corrected if harvest else phrases)


@pytest.mark.parametrize("harvest", [True, False])
def test_runs_of_an_accepted_trunk_are_phrases(harvest):
    slow = SlowOuroboros(Follower(), Follower(), **plain(gamma=3, harvest_trunk=harvest))
    slow.generate([1, 2, 3], 1)
    of_window = {4: [(2, 3, 4)], 5: [(3, 4, 5)]}
    harvested = {3: [(4, 5, 6)], 4: [(2, 3, 4), (5, 6, 7)], 5: [(3, 4, 5)]}
    assert slow.pool == (harvested if harvest else of_window)


@pytest.mark.parametrize(
    ("gamma", "trunk", "branches"),
    [
        (1, [4], [(5, 6, 7), (9, 9, 9)]),
        (6, [4, 5, 6, 7, 0, 1], [(1, 1, 1)]),
        (9, [4, 5, 6, 7, 0, 1, 2], []),
    ],
)
def test_the_newest_phrases_fill_the_trunk_where_forwards_ran_out(gamma, trunk, branches):
    slow = SlowOuroboros(Follower(), Follower(), **plain(gamma=gamma, max_forwards=1))
    slow.pool = {4: [(9, 9, 9), (5, 6, 7)], 7: [(0, 1, 2)], 1: [(1, 1, 1)]}
    [result] = slow.generate([1, 2, 3], 1)
    assert (result.draft_forwards, result.trunk, result.branches) == (1, trunk, branches)
    assert result.new_tokens == [4, 5, 6, 7, 8]


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), min_size=2, max_size=2
    ),
    options=st.fixed_dictionaries(
        {
            "gamma": st.integers(1, 6),
            "window": st.integers(1, 4),
            "guesses": st.integers(0, 4),
            "phrase_length": st.integers(3, 6),
            "branches": st.integers(0, 3),
            "max_forwards": st.none() | st.integers(0, 3),
            "harvest_trunk": st.booleans(),
            "harvest_branches": st.booleans(),
        }
    ),
)
def test_every_round_is_greedy_decoding_whatever_the_sizes(prompts, options):
    target, draft = Reader(odd=5), Reader(odd=100)
    slow = SlowOuroboros(target, draft, **options)
    for prompt in prompts:
        text = list(prompt)
        for result in slow.generate(prompt, 5):
            if options["max_forwards"] is None:
                assert result.trunk == greedy(draft, text, options["gamma"])
            assert result.new_tokens == greedy(target, text, len(result.new_tokens))
            text += result.new_tokens
    for phrases in slow.pool.values():
        kept = max(options["guesses"], options["branches"], 1)
        assert len(phrases) == len(set(phrases)) <= kept
        assert {len(phrase) for phrase in phrases} == {options["phrase_length"] - 1}
