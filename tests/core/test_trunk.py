"""Trunks of a draft model, whatever it is told to try, and how often its choices were right."""

from __future__ import annotations

import itertools
import math
from operator import mul

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.recycling_steps import ends_of
from tests.core.strategies import BRIEF
from vllm_recycle.core.acceptance import PRIOR_WEIGHT
from vllm_recycle.core.adjacency import NUM_CLASSES, NUM_COUNTED
from vllm_recycle.core.grow import TextEnds, Trunks
from vllm_recycle.core.trunk import CHOICES, PARTS, ChoiceAcceptance, draft_trunks

CLASSES = torch.tensor([0, 1, 0, 1, 2, 3])  # of the requests
VOCAB, REACH = 8, 4


def probabilities(text: list[int]) -> torch.Tensor:
    """What a toy model says behind a text."""
    generator = torch.Generator().manual_seed(hash(tuple(text[-3:])) % 2**31)
    return (4 * torch.rand(VOCAB, generator=generator, dtype=torch.float64)).softmax(0)


class ToyModel:
    """Reads what is new of each text, as the draft model does."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.read = [text[:-1] for text in texts]
        self.num_forwards = 0

    def choose(self, idx_mapping, new_token_ids, row_token_ids, choices):
        self.num_forwards += 1
        rows = []
        pairs = zip(new_token_ids.tolist(), row_token_ids.tolist(), strict=True)
        for b, (new, tried) in zip(idx_mapping.tolist(), pairs, strict=True):
            self.read[b] += [token for token in new if token >= 0]
            texts = [self.read[b] + tried[:count] for count in range(len(tried) + 1)]
            rows.append(torch.stack([probabilities(text) for text in texts]).topk(choices))
        return torch.stack([row.indices for row in rows]), torch.stack([row.values for row in rows])


def chain(text: list[int], length: int) -> list[int]:
    text = [*text]
    for _ in range(length):
        text.append(int(probabilities(text).argmax()))
    return text[len(text) - length :]


def nothing(ends: TextEnds) -> list[list[int]]:
    """A guess that says nothing."""
    return [[] for _ in ends.max_depths]


def draft(
    texts: list[list[int]], depths: list[int], guess=nothing, *, gamma: int, **given
) -> tuple[Trunks, int]:
    """The trunks of some texts where nothing was counted, and the forwards that they took."""
    model, ends = ToyModel(texts), TextEnds(torch.arange(len(texts)), ends_of(texts), depths)
    acceptance = ChoiceAcceptance(CLASSES)
    trunks = draft_trunks(ends, model, guess, acceptance, gamma=gamma, reach=REACH, **given)
    return trunks, model.num_forwards


token = st.integers(0, VOCAB - 1)


@BRIEF
@given(
    texts=st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=3),
    gamma=st.integers(1, 5),
    data=st.data(),
)
def test_trunks_are_what_the_draft_model_says_alone(texts, gamma, data):
    depths = [data.draw(st.integers(0, 6)) for _ in texts]
    right = data.draw(st.lists(st.integers(0, 5), min_size=1))
    drafted = dict.fromkeys(range(len(texts)), 0)

    def guess(ends: TextEnds) -> list[list[int]]:
        """Some tokens right, and then one that is wrong."""
        guesses = []
        for b, depth, tail in zip(
            ends.idx_mapping.tolist(), ends.max_depths, ends.ends.tails(REACH), strict=True
        ):
            text = texts[b] + chain(texts[b], drafted[b])
            assert tail[: len(text)] == text[::-1][:REACH]
            count = min(depth, right[drafted[b] % len(right)])
            said = chain(text, depth)
            wrong = [(token + 1) % VOCAB for token in said[count : count + 1]]
            guesses.append(said[:count] + wrong)
            drafted[b] += count + 1
        return guesses

    trunks, _ = draft(texts, depths, guess, gamma=gamma)
    for b, text in enumerate(texts):
        length = min(gamma, depths[b])
        expected = chain(text, length)
        for place in range(length):
            best = probabilities(text + expected[:place]).topk(CHOICES)
            assert trunks.token_ids[b, place].equal(best.indices)
            assert trunks.chances[b, place].equal(best.values)
        assert (trunks.token_ids[b, length:] == -1).all()
        assert not trunks.chances[b, length:].any()


@pytest.mark.parametrize(("count", "forwards"), [(0, 5), (1, 3), (4, 1)])
def test_what_is_guessed_saves_forwards(count, forwards):
    def guess(ends: TextEnds) -> list[list[int]]:
        ([tail], [depth]) = ends.ends.tails(3), ends.max_depths
        return [chain(tail[::-1], min(count, depth))]

    trunks, num_forwards = draft([[1, 2, 3]], [5], guess, gamma=5)
    assert trunks.token_ids[0, :, 0].tolist() == chain([1, 2, 3], 5)
    assert num_forwards == forwards


def chances(text: list[int], length: int) -> list[float]:
    """That trunks of one token, two, and so on are right, where nothing was counted."""
    tokens = [*text, *chain(text, length)]
    ends = range(len(text), len(tokens))
    return list(
        itertools.accumulate((float(probabilities(tokens[:end]).max()) for end in ends), mul)
    )


@pytest.mark.parametrize("length", range(1, 6))
def test_a_trunk_ends_where_a_forward_more_does_not_pay(length):
    text = [1, 2, 3]
    least = chances(text, 5)[length - 1] * 1.001  # more than is left of the chance there
    trunks, num_forwards = draft([text], [5], gamma=5, least_chance=least)
    assert trunks.token_ids[0, :, 0].tolist() == [*chain(text, length), *[-1] * (5 - length)]
    assert num_forwards == length


def test_trunks_that_share_a_forward_pay_equal_parts_of_it():
    # The least sure text and two that are surer: there is a price that two pay, and three do not.
    least_sure, *_, sure, surest = sorted(
        ([token] for token in range(VOCAB)), key=lambda text: chances(text, 1)[0]
    )
    texts = [sure, least_sure, surest]
    first = [chances(text, 1)[0] for text in texts]
    low, middle, high = sorted(first)
    assert 2 * middle > 3 * low

    def go_on(least: float) -> list[bool]:
        trunks, _ = draft(texts, [2, 2, 2], gamma=2, least_chance=least)
        return (trunks.token_ids[:, 1, 0] >= 0).tolist()

    assert go_on(2.99 * low) == [True] * 3
    assert go_on(1.99 * middle) == [chance > low for chance in first]
    assert go_on(max(high, 2 * middle, 3 * low) * 1.001) == [False] * 3


@BRIEF
@given(data=st.data(), batch=st.integers(1, 3), gamma=st.integers(1, 4))
def test_choices_are_counted_where_the_trunk_before_them_was_right(data, batch, gamma):
    def of_places(values, *shape: int) -> torch.Tensor:
        count = math.prod(shape)
        return torch.tensor(data.draw(st.lists(values, min_size=count, max_size=count))).view(shape)

    some, shape = st.integers(-1, 2), (batch, gamma, CHOICES)
    trunks = Trunks(of_places(some, *shape), of_places(st.floats(0, 1), *shape).double())
    followed = of_places(some, batch, data.draw(st.integers(1, 6)))
    idx_mapping = of_places(st.integers(0, len(CLASSES) - 1), batch)
    acceptance = ChoiceAcceptance(CLASSES)
    acceptance.count(trunks, idx_mapping, followed)
    expected = torch.zeros(NUM_CLASSES, CHOICES, PARTS, 2, dtype=torch.float64)
    classes = CLASSES[idx_mapping].tolist()
    for b in range(batch):
        for place, token in enumerate(followed[b].tolist()[:gamma]):
            if token < 0 or classes[b] >= NUM_COUNTED:
                break
            for choice, offered in enumerate(trunks.token_ids[b, place].tolist()):
                if offered >= 0:
                    part = min(PARTS - 1, int(float(trunks.chances[b, place, choice]) * PARTS))
                    cell = expected[classes[b], choice, part]
                    cell += torch.tensor([float(offered == token), 1.0])
            if trunks.token_ids[b, place, 0] != token:
                break
    assert acceptance.counts.equal(expected)
    chances = acceptance.chances(trunks, idx_mapping).chances
    part = min(PARTS - 1, int(float(trunks.chances[0, 0, 0]) * PARTS))
    right, seen = expected[classes[0], 0, part].tolist()
    prior = PRIOR_WEIGHT * float(trunks.chances[0, 0, 0])
    is_token = trunks.token_ids[0, 0, 0] >= 0
    chance = is_token * (right + prior) / (seen + PRIOR_WEIGHT)
    assert float(chances[0, 0, 0]) == pytest.approx(float(chance))


def test_where_there_is_no_token_the_chance_is_none():
    choices = ChoiceAcceptance(CLASSES)
    choices.has_probabilities = False
    token_ids = torch.tensor([[[5, -1, -1], [6, 7, -1]]])
    trunks = Trunks(token_ids, torch.full(token_ids.shape, 0.5))
    assert choices.chances(trunks, torch.tensor([0])).chances.tolist() == [
        [[0.5, 0.0, 0.0], [0.5, 0.5, 0.0]]
    ]
