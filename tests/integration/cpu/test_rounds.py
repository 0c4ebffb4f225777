"""For whom a round of the draft model is made: by what such rounds gave, and what they took."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_recycle.integration.cpu import rounds as module
from vllm_recycle.integration.cpu.rounds import CORRECT_EVERY, LOOK_EVERY, MOST_READING, Rounds


def rounds_of(forwards: dict[int, float], *, reading: float = 0.0) -> Rounds:
    """Where each step without drafts takes a second."""
    return Rounds({1: 1.0}, forwards, reading)


def pays(rounds: Rounds, num_reqs: int, alone: float) -> bool:
    """Whether a round is made for requests that have much to say, and nothing to read."""
    chosen = rounds.choose(alone, np.zeros(num_reqs), np.full(num_reqs, 1000))
    assert chosen.all() == chosen.any()
    return bool(chosen.any())


def test_a_round_is_left_out_where_such_rounds_gave_less_and_is_looked_at_again():
    rounds = rounds_of({1: 0.5})
    assert pays(rounds, 2, 3.0)  # nothing is known
    for _ in range(20):
        rounds.gave(2, 2, 3.0, rate=2.8, seconds=0.1)
    asked = [pays(rounds, 2, 3.0) for _ in range(2 * LOOK_EVERY)]
    assert [place for place, pays in enumerate(asked, start=1) if pays] == [32, 64]
    # Steps that are worth less alone, or have more requests, are others.
    assert pays(rounds, 2, 2.0)
    assert pays(rounds, 8, 12.0)
    for _ in range(20):
        rounds.gave(2, 2, 3.0, rate=3.6, seconds=0.1)
    assert pays(rounds, 2, 3.0)


def test_one_round_that_gave_little_does_not_end_all():
    rounds = rounds_of({1: 0.5})
    rounds.gave(1, 1, 2.0, rate=1.5, seconds=0.1)
    assert pays(rounds, 1, 2.0)
    for _ in range(3):
        rounds.gave(1, 1, 2.0, rate=1.5, seconds=0.1)
    assert not pays(rounds, 1, 2.0)


def test_a_forward_costs_what_it_takes_in_parts_of_a_step(monkeypatch):
    monkeypatch.setattr(module, "from_first_rank", lambda value: value)
    rounds = rounds_of({1: 0.5})
    for _ in range(CORRECT_EVERY):
        assert rounds.cost(1, 1) == 0.5
        rounds.served(1, 0.2)
        rounds.gave(1, 1, 1.0, rate=2.0, seconds=0.05)
        rounds.gave(1, 1, 1.0, rate=2.0, seconds=None)  # what had a prompt to read says nothing
    assert rounds.cost(1, 1) == pytest.approx(0.25)


def test_a_forward_costs_by_who_drafts_in_it_and_by_whose_step_waits(monkeypatch):
    monkeypatch.setattr(module, "from_first_rank", lambda value: value)
    rounds = Rounds({1: 1.0, 20: 2.0}, {1: 0.25, 20: 0.5}, 0.0)
    assert [rounds.cost(n, n) for n in (1, 3, 8, 16, 64)] == [0.25] * 5
    assert (rounds.cost(20, 1), rounds.cost(1, 20)) == (0.125, 0.5)
    for _ in range(CORRECT_EVERY):
        rounds.served(8, 0.4)
        rounds.gave(8, 8, 8.0, rate=9.0, seconds=0.4)
    costs = [rounds.cost(n, n) for n in (1, 8, 15, 16)]
    assert costs == pytest.approx([0.25, 1.0, 1.0, 0.25])
    # And so more of it must be sure.
    assert rounds.least_chance(8, 8, 8.0) / 8 > 1.5 * rounds.least_chance(16, 16, 16.0) / 16


def test_a_forward_pays_by_what_such_rounds_gave():
    rounds = rounds_of({1: 0.25})
    assert rounds.least_chance(1, 1, 2.0) == 0.25 * 2.5
    rounds.gave(1, 1, 2.0, rate=3.5, seconds=0.1)
    assert rounds.least_chance(1, 1, 2.0) == 0.25 * (2.5 + 1.0 / 4)
    for _ in range(20):
        rounds.gave(8, 8, 10.0, rate=9.0, seconds=0.1)
    assert rounds.least_chance(8, 8, 10.0) == 2.5  # what a step without a round gives


def test_what_rounds_give_is_believed_by_what_they_gave_to_steps_that_are_worth_less_or_more():
    rounds = rounds_of({1: 1.0})
    for _ in range(40):
        rounds.gave(4, 4, 5.0, rate=4.5, seconds=0.1)
    # In parts no more where rows give more by themselves.
    assert rounds.least_chance(4, 4, 2 * 5.0) == 10.0
    assert not pays(rounds, 4, 10.0)
    # Where they give less a round may give more: half as far from what it gave as at first.
    assert rounds.least_chance(4, 4, 2.5) == pytest.approx(2.5 * (0.9 * 1.25) ** 0.5, rel=0.01)
    assert pays(rounds, 4, 2.5)
    assert pays(rounds, 8, 9.0)
    for _ in range(100):
        rounds.gave(4, 4, 5.0, rate=7.0, seconds=0.1)
    assert rounds.least_chance(4, 4, 2 * 5.0) == pytest.approx(14.0, rel=0.01)
    assert pays(rounds, 4, 10.0)


def test_a_prompt_is_read_where_the_answer_gains_more_than_that_takes():
    rounds = Rounds({1: 1.0, 16: 5.0}, {1: 0.25}, 0.01)

    def reads(behind: int, left: int, num_reqs: int = 1) -> bool:
        # A token of each takes half of a step alone, with rounds 0.4 of one.
        of_each = np.full(num_reqs, behind), np.full(num_reqs, left)
        return bool(rounds.choose(2.0 * num_reqs, *of_each).all())

    assert [reads(900, 100), reads(1100, 100), reads(0, 100), reads(0, 0)] == [
        True,
        False,
        True,
        False,
    ]
    # Where many share a step a token gains less time, but a step takes longer.
    assert [reads(300, 100, 16), reads(320, 100, 16)] == [True, False]


def test_a_prompt_that_is_not_worth_it_leaves_the_others_their_round():
    rounds = rounds_of({1: 0.25}, reading=0.01)
    behind, left = np.array([0, 2000, 10, 0]), np.array([100, 100, 100, 0])
    assert rounds.choose(8.0, behind, left).tolist() == [True, False, True, False]
    # What such rounds gave is not what one of all would give.
    for _ in range(20):
        rounds.gave(4, 2, 8.0, rate=7.0, seconds=0.1)
    assert not rounds.choose(8.0, behind, left).any()
    assert rounds.choose(8.0, np.zeros(4), left + 1).all()


def test_rounds_of_a_part_are_believed_to_gain_a_part():
    rounds = rounds_of({1: 1.0})
    assert rounds.least_chance(8, 8, 8.0) == 10.0
    assert rounds.least_chance(8, 2, 8.0) == 8.5
    for _ in range(100):
        rounds.gave(8, 8, 8.0, rate=16.0, seconds=None)
    assert rounds.least_chance(8, 2, 8.0) == pytest.approx(10.0, rel=0.01)


def test_no_more_is_expected_of_an_answer_than_answers_have():
    rounds = rounds_of({1: 0.25}, reading=0.01)
    behind, left = np.array([500]), np.array([4000])
    assert rounds.choose(2.0, behind, left).all()
    for _ in range(3):
        rounds.ended(40)
    assert not rounds.choose(2.0, behind, left).any()
    assert rounds.choose(2.0, behind // 2, left).all()
    for _ in range(40):
        rounds.ended(80)
    assert rounds.choose(2.0, behind, left).all()


def test_a_look_that_must_read_much_is_rare():
    def looks(behind: int) -> list[int]:
        rounds = rounds_of({1: 0.25}, reading=0.01)
        for _ in range(40):
            rounds.gave(1, 1, 2.0, rate=1.5, seconds=0.1)
        step = np.array([behind]), np.array([1000])
        return [number for number in range(1, 2000) if rounds.choose(2.0, *step).any()]

    assert looks(50) == [*range(LOOK_EVERY, 2000, LOOK_EVERY)]
    assert looks(300) == [*range(3 * LOOK_EVERY, 2000, 3 * LOOK_EVERY)]
    assert len(looks(100 * MOST_READING)) == 1
    assert not looks(100 * MOST_READING + 1)
