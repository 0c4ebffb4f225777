"""When a round of the draft model is made: by what such rounds gave, and what they took."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_recycle.integration.cpu import rounds as module
from vllm_recycle.integration.cpu.rounds import CORRECT_EVERY, LOOK_EVERY, Rounds

NO_READINGS = {1: 0.0}


def pays(rounds: Rounds, num_reqs: int, alone: float) -> bool:
    """Whether a round is made for requests that have much to say, and nothing to read."""
    behind, left = np.zeros(num_reqs), np.full(num_reqs, 1000)
    pay = rounds.that_pay(alone, behind, left)
    assert pay.all() == pay.any()
    return bool(pay.any())


def test_a_round_is_left_out_where_such_rounds_gave_less_and_is_looked_at_again():
    rounds = Rounds({1: 0.5}, NO_READINGS)
    assert pays(rounds, 2, 3.0)  # nothing is known
    for _ in range(20):
        rounds.gave(2, 3.0, rate=2.8, seconds=0.1)
    asked = [pays(rounds, 2, 3.0) for _ in range(2 * LOOK_EVERY)]
    assert [place for place, pays in enumerate(asked, start=1) if pays] == [32, 64]
    # Steps that are worth less alone, or have more requests, are others.
    assert pays(rounds, 2, 2.0)
    assert pays(rounds, 8, 12.0)
    for _ in range(20):
        rounds.gave(2, 3.0, rate=3.6, seconds=0.1)
    assert pays(rounds, 2, 3.0)


def test_one_round_that_gave_little_does_not_end_all():
    rounds = Rounds({1: 0.5}, NO_READINGS)
    rounds.gave(1, 2.0, rate=1.5, seconds=0.1)
    assert pays(rounds, 1, 2.0)
    for _ in range(3):
        rounds.gave(1, 2.0, rate=1.5, seconds=0.1)
    assert not pays(rounds, 1, 2.0)


def test_a_forward_costs_what_it_takes_in_parts_of_a_step(monkeypatch):
    monkeypatch.setattr(module, "from_first_rank", lambda value: value)
    rounds = Rounds({1: 0.5}, NO_READINGS)
    for _ in range(CORRECT_EVERY):
        assert rounds.cost(1) == 0.5
        rounds.served(1, 0.2)
        rounds.gave(1, 1.0, rate=2.0, seconds=0.05)
        rounds.gave(1, 1.0, rate=2.0, seconds=None)  # what had a prompt to read says nothing
    assert rounds.cost(1) == pytest.approx(0.25)


def test_a_forward_for_many_requests_has_a_cost_of_its_own(monkeypatch):
    monkeypatch.setattr(module, "from_first_rank", lambda value: value)
    rounds = Rounds({1: 0.25, 20: 0.5}, NO_READINGS)
    assert [rounds.cost(n) for n in (1, 3, 8, 16, 64)] == [0.25, 0.25, 0.5, 0.5, 0.5]
    for _ in range(CORRECT_EVERY):
        rounds.served(8, 0.4)
        rounds.gave(8, 8.0, rate=9.0, seconds=0.4)
    assert [rounds.cost(n) for n in (1, 8, 15, 16)] == pytest.approx([0.25, 1.0, 1.0, 0.5])
    # And so more of it must be sure.
    assert rounds.least_chance(8, 8.0) / 8 > 1.5 * rounds.least_chance(16, 16.0) / 16


def test_a_forward_pays_by_what_such_rounds_gave():
    rounds = Rounds({1: 0.25}, NO_READINGS)
    assert rounds.least_chance(1, 2.0) == 0.25 * 2.5
    rounds.gave(1, 2.0, rate=3.5, seconds=0.1)
    assert rounds.least_chance(1, 2.0) == 0.25 * (2.5 + 1.0 / 4)
    for _ in range(20):
        rounds.gave(8, 10.0, rate=9.0, seconds=0.1)
    assert rounds.least_chance(8, 10.0) == 2.5  # what a step without a round gives


def test_where_rounds_gave_little_beside_rows_that_give_less_they_are_believed_to_give_little():
    rounds = Rounds({1: 0.25}, NO_READINGS)
    for _ in range(40):
        rounds.gave(4, 5.0, rate=4.0, seconds=0.1)
    assert not pays(rounds, 4, 9.0)
    assert pays(rounds, 4, 3.0)
    assert pays(rounds, 8, 9.0)
    for _ in range(100):
        rounds.gave(4, 5.0, rate=7.0, seconds=0.1)
    assert pays(rounds, 4, 9.0)


def test_a_prompt_is_read_where_the_answer_gains_more_than_that_takes():
    rounds = Rounds({1: 0.25}, {1: 0.01, 16: 0.002})
    # A token alone takes half of a step, by rounds 0.4; a token of a prompt takes a hundredth.
    behind, left = np.array([900, 1100, 0, 900]), np.array([100, 100, 100, 0])
    alone = [
        rounds.that_pay(2.0, behind[place : place + 1], left[place : place + 1])[0]
        for place in range(4)
    ]
    assert alone == [True, False, True, False]
    # Where many share a step, a token takes less time of each, and so does one of a prompt.
    few = rounds.that_pay(16 * 2.0, np.full(16, 300), np.full(16, 100))
    many = rounds.that_pay(16 * 2.0, np.full(16, 320), np.full(16, 100))
    assert (few.all(), many.any()) == (True, False)


def test_no_more_is_expected_of_an_answer_than_answers_have():
    rounds = Rounds({1: 0.25}, {1: 0.01})
    behind, left = np.array([500]), np.array([4000])
    assert rounds.that_pay(2.0, behind, left).all()
    for _ in range(3):
        rounds.ended(40)
    assert not rounds.that_pay(2.0, behind, left).any()
    assert rounds.that_pay(2.0, behind // 2, left).all()
    for _ in range(40):
        rounds.ended(80)
    assert rounds.that_pay(2.0, behind, left).all()


def test_a_look_that_must_read_much_is_rare():
    def looks(behind: int) -> list[int]:
        rounds = Rounds({1: 0.25}, {1: 0.01})
        for _ in range(40):
            rounds.gave(1, 2.0, rate=1.5, seconds=0.1)
        step = np.array([behind]), np.array([1000])
        return [number for number in range(1, 200) if rounds.that_pay(2.0, *step).any()]

    assert looks(50) == [*range(LOOK_EVERY, 200, LOOK_EVERY)]
    assert looks(300) == [*range(3 * LOOK_EVERY, 200, 3 * LOOK_EVERY)]
