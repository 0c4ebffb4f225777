"""For whom a round of the draft model is made: by what such rounds gave, and what they took."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_recycle.core.explore import LOOK_AT_ROUNDS_EVERY, MOST_READING
from vllm_recycle.core.rounds import AT_FIRST, CORRECT_EVERY, Rounds, StepAlone


def alone(num_reqs: int, rate: float) -> StepAlone:
    """One that takes a second without drafts."""
    return StepAlone(num_reqs, 1.0, rate)


def give(rounds: Rounds, step: StepAlone, num_drafting: int, *, rate: float, times: int) -> None:
    """So many rounds, whose forwards had prompts to read."""
    for _ in range(times):
        rounds.gave(step, num_drafting, rate=rate, seconds=None)


def pays(rounds: Rounds, num_reqs: int, rate: float, unit: float = 1.0) -> bool:
    """Whether a round is made for requests that have much to say, and nothing to read."""
    step = StepAlone(num_reqs, unit, rate)
    chosen = rounds.choose(step, np.zeros(num_reqs), np.full(num_reqs, 1000))
    assert chosen.all() == chosen.any()
    return bool(chosen.any())


def test_a_round_is_left_out_where_such_rounds_gave_less_and_is_looked_at_again():
    rounds = Rounds({1: 0.25}, 0.0)
    assert pays(rounds, 2, 3.0)  # nothing is known
    give(rounds, alone(2, 3.0), 2, rate=2.2, times=1)
    assert pays(rounds, 2, 3.0)  # one that gave little does not end all
    give(rounds, alone(2, 3.0), 2, rate=2.8, times=20)
    asked = [pays(rounds, 2, 3.0) for _ in range(2 * LOOK_AT_ROUNDS_EVERY)]
    assert [place for place, pays in enumerate(asked, start=1) if pays] == [32, 64]
    # Steps that are worth less alone, or have more requests, are others.
    assert pays(rounds, 2, 2.0)
    assert pays(rounds, 8, 12.0)
    give(rounds, alone(2, 3.0), 2, rate=3.6, times=20)
    assert pays(rounds, 2, 3.0)


def test_a_forward_takes_what_it_took_while_serving_but_for_stalls():
    rounds = Rounds({1: 0.25, 20: 0.5}, 0.0)
    assert [rounds.seconds(n) for n in (1, 3, 8, 16, 64)] == [0.25, 0.25, 0.5, 0.5, 0.5]
    for _ in range(CORRECT_EVERY):
        assert rounds.seconds(8) == 0.5
        rounds.gave(alone(16, 16.0), 8, rate=17.0, seconds=0.8)
        give(rounds, alone(16, 16.0), 8, rate=17.0, times=1)
    assert [rounds.seconds(n) for n in (1, 8, 9, 15, 16)] == pytest.approx(
        [0.25, 0.8, 0.8, 0.5, 0.5]
    )
    # But no stall.
    for seconds in [0.25] * (CORRECT_EVERY - 1) + [10.0]:
        rounds.gave(alone(1, 1.0), 1, rate=1.2, seconds=seconds)
    assert 0.25 < rounds.seconds(1) < 0.3


def test_a_forward_pays_by_what_such_rounds_gave():
    rounds = Rounds({1: 0.25}, 0.0)
    believed = 2.0 * AT_FIRST / 1.25
    assert rounds.least_chance(alone(1, 2.0), 1) == pytest.approx(0.25 * believed)
    give(rounds, alone(1, 2.0), 1, rate=believed + 1.0, times=1)
    assert rounds.least_chance(alone(1, 2.0), 1) == pytest.approx(0.25 * (believed + 1.0 / 4))
    give(rounds, alone(8, 10.0), 8, rate=9.0, times=20)
    assert rounds.least_chance(alone(8, 10.0), 8) == 2.5  # what a step without a round gives


def test_the_dearer_a_forward_is_in_parts_of_the_step_the_less_a_round_is_believed_to_give():
    rounds = Rounds({1: 0.2}, 0.0)
    assert rounds.least_chance(StepAlone(1, 1.0, 1.0), 1) == pytest.approx(0.2 * AT_FIRST / 1.2)
    assert rounds.least_chance(StepAlone(1, 0.4, 1.0), 1) == pytest.approx(0.5)
    assert [pays(rounds, 1, 1.0, unit) for unit in (1.0, 0.41, 0.39)] == [True, True, False]
    # What rounds gained at one cost is what they gain at another.
    give(rounds, StepAlone(1, 1.0, 1.0), 1, rate=1.3 / 1.2, times=60)
    assert [pays(rounds, 1, 1.0, unit) for unit in (0.7, 0.6)] == [True, False]


def test_what_rounds_give_is_believed_by_what_they_gave_to_steps_that_are_worth_less_or_more():
    rounds = Rounds({1: 0.2}, 0.0)
    give(rounds, alone(4, 5.0), 4, rate=4.5, times=40)
    # In parts no more where rows give more by themselves.
    assert rounds.least_chance(alone(4, 2 * 5.0), 4) == 0.2 * 10.0
    assert not pays(rounds, 4, 10.0)
    # Where they give less a round may give more: half as far from what it gave as at first.
    believed = 2.5 * (0.9 * 1.25) ** 0.5
    assert rounds.least_chance(alone(4, 2.5), 4) == pytest.approx(0.2 * believed, rel=0.01)
    assert pays(rounds, 4, 2.5)
    give(rounds, alone(4, 5.0), 4, rate=7.0, times=100)
    assert rounds.least_chance(alone(4, 2 * 5.0), 4) == pytest.approx(0.2 * 14.0, rel=0.01)
    assert pays(rounds, 4, 10.0)


def test_a_prompt_is_read_where_the_answer_gains_more_than_that_takes():
    rounds = Rounds({1: 0.2, 16: 1.0}, 0.01)

    def reads(behind: int, left: int, num_reqs: int = 1) -> bool:
        unit = 1.0 if num_reqs == 1 else 5.0
        # A token of each takes half of a step alone, with rounds 0.4 of one.
        of_each = np.full(num_reqs, behind), np.full(num_reqs, left)
        return bool(rounds.choose(StepAlone(num_reqs, unit, 2.0 * num_reqs), *of_each).all())

    assert [reads(900, 100), reads(1100, 100), reads(0, 100)] == [True, False, True]
    # Where many share a step a token gains less time, but a step takes longer.
    assert [reads(300, 100, 16), reads(320, 100, 16)] == [True, False]


def test_a_prompt_that_is_not_worth_it_leaves_the_others_their_round():
    rounds = Rounds({1: 0.2}, 0.01)
    behind, left = np.array([0, 2000, 10, 0]), np.array([100, 100, 100, 0])
    assert rounds.choose(alone(4, 8.0), behind, left).tolist() == [True, False, True, False]
    give(rounds, alone(4, 8.0), 2, rate=7.0, times=20)
    assert not rounds.choose(alone(4, 8.0), behind, left).any()


def test_a_round_of_a_part_gains_a_part():
    rounds = Rounds({2: 0.05, 8: 0.2}, 0.0)
    assert rounds.least_chance(alone(8, 8.0), 2) == pytest.approx(0.05 * 8 * 1.125 / 1.05)
    give(rounds, alone(8, 8.0), 8, rate=16.0, times=100)
    of_part = 8 * (1 + 1.4 / 4) / 1.05
    assert rounds.least_chance(alone(8, 8.0), 2) == pytest.approx(0.05 * of_part, rel=0.01)
    rounds = Rounds({2: 0.05, 8: 0.2}, 0.0)
    give(rounds, alone(8, 8.0), 2, rate=of_part, times=100)
    assert rounds.least_chance(alone(8, 8.0), 8) == pytest.approx(0.2 * 16.0, rel=0.01)


def test_rounds_that_gave_next_to_nothing_are_not_believed_to_take_tokens():
    rounds = Rounds({1: 0.2}, 0.0)
    give(rounds, alone(16, 16.0), 1, rate=4.0, times=100)
    assert rounds.least_chance(alone(16, 16.0), 16) == 0.2 * 16.0
    assert not pays(rounds, 16, 16.0)


def test_no_more_is_expected_of_an_answer_than_answers_have():
    rounds = Rounds({1: 0.2}, 0.01)
    behind, left = np.array([500]), np.array([4000])
    assert rounds.choose(alone(1, 2.0), behind, left).all()
    for _ in range(3):
        rounds.ended(40)
    assert not rounds.choose(alone(1, 2.0), behind, left).any()
    assert rounds.choose(alone(1, 2.0), behind // 2, left).all()
    for _ in range(40):
        rounds.ended(80)
    assert rounds.choose(alone(1, 2.0), behind, left).all()


def test_a_look_that_must_read_much_is_rare():
    def looks(behind: int) -> list[int]:
        rounds = Rounds({1: 0.2}, 0.01)
        give(rounds, alone(1, 2.0), 1, rate=1.5, times=40)
        step = np.array([behind]), np.array([1000])
        return [number for number in range(1, 2000) if rounds.choose(alone(1, 2.0), *step).any()]

    assert looks(50) == [*range(LOOK_AT_ROUNDS_EVERY, 2000, LOOK_AT_ROUNDS_EVERY)]
    assert looks(300) == [*range(3 * LOOK_AT_ROUNDS_EVERY, 2000, 3 * LOOK_AT_ROUNDS_EVERY)]
    assert len(looks(100 * MOST_READING)) == 1
    assert not looks(100 * MOST_READING + 1)
