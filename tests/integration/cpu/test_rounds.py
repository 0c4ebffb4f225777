"""When a round of the draft model is made: by what such rounds gave, and what they took."""

from __future__ import annotations

import pytest

from vllm_recycle.integration.cpu import trunk
from vllm_recycle.integration.cpu.trunk import CORRECT_EVERY, LOOK_EVERY, Rounds


def test_a_round_is_left_out_where_such_rounds_gave_less_and_is_looked_at_again():
    rounds = Rounds({1: 0.5})
    assert rounds.pays(2, 3.0)  # nothing is known
    for _ in range(20):
        rounds.gave(2, 3.0, rate=2.8, seconds=0.1)
    asked = [rounds.pays(2, 3.0) for _ in range(2 * LOOK_EVERY)]
    assert [place for place, pays in enumerate(asked, start=1) if pays] == [32, 64]
    # Steps that are worth less alone, or have more requests, are others.
    assert rounds.pays(2, 2.0)
    assert rounds.pays(8, 12.0)
    for _ in range(20):
        rounds.gave(2, 3.0, rate=3.6, seconds=0.1)
    assert rounds.pays(2, 3.0)


def test_one_round_that_gave_little_does_not_end_all():
    rounds = Rounds({1: 0.5})
    rounds.gave(1, 2.0, rate=1.5, seconds=0.1)
    assert rounds.pays(1, 2.0)
    for _ in range(3):
        rounds.gave(1, 2.0, rate=1.5, seconds=0.1)
    assert not rounds.pays(1, 2.0)


def test_a_forward_costs_what_it_takes_in_parts_of_a_step(monkeypatch):
    monkeypatch.setattr(trunk, "from_first_rank", lambda value: value)
    rounds = Rounds({1: 0.5})
    for _ in range(CORRECT_EVERY):
        assert rounds.cost(1) == 0.5
        rounds.served(1, 0.2)
        rounds.gave(1, 1.0, rate=2.0, seconds=0.05)
        rounds.gave(1, 1.0, rate=2.0, seconds=None)  # what had a prompt to read says nothing
    assert rounds.cost(1) == pytest.approx(0.25)


def test_a_forward_for_many_requests_has_a_cost_of_its_own(monkeypatch):
    monkeypatch.setattr(trunk, "from_first_rank", lambda value: value)
    rounds = Rounds({1: 0.25, 20: 0.5})
    assert [rounds.cost(n) for n in (1, 3, 8, 16, 64)] == [0.25, 0.25, 0.5, 0.5, 0.5]
    for _ in range(CORRECT_EVERY):
        rounds.served(8, 0.4)
        rounds.gave(8, 8.0, rate=9.0, seconds=0.4)
    assert [rounds.cost(n) for n in (1, 8, 15, 16)] == pytest.approx([0.25, 1.0, 1.0, 0.5])
    # And so more of it must be sure.
    assert rounds.least_chance(8, 8.0) / 8 > 1.5 * rounds.least_chance(16, 16.0) / 16


def test_a_forward_pays_by_what_such_rounds_gave():
    rounds = Rounds({1: 0.25})
    assert rounds.least_chance(1, 2.0) == 0.25 * 2.5
    rounds.gave(1, 2.0, rate=3.5, seconds=0.1)
    assert rounds.least_chance(1, 2.0) == 0.25 * (2.5 + 1.0 / 4)
    for _ in range(20):
        rounds.gave(8, 10.0, rate=9.0, seconds=0.1)
    assert rounds.least_chance(8, 10.0) == 2.5  # what a step without a round gives


def test_where_rounds_gave_little_beside_rows_that_give_less_they_are_believed_to_give_little():
    rounds = Rounds({1: 0.25})
    for _ in range(40):
        rounds.gave(4, 5.0, rate=4.0, seconds=0.1)
    assert not rounds.pays(4, 9.0)
    assert rounds.pays(4, 3.0)
    assert rounds.pays(8, 9.0)
    for _ in range(100):
        rounds.gave(4, 5.0, rate=7.0, seconds=0.1)
    assert rounds.pays(4, 9.0)
