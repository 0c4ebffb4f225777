"""For which requests a draft model makes a round: by what rounds gave, and what they take."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_recycle.core.choose import Chooser
from vllm_recycle.core.curve import TREES, TRUNKS, Load, MeasuredCurve
from vllm_recycle.core.explore import EARNED, FIRST_GAIN, STAKE

MAX_ROWS, ROUND = 64, 0.25
MUCH = 1000


def make_chooser(round_seconds: float = ROUND) -> Chooser:
    """Of an engine whose plain step takes a second, and whose rows take 0.02 seconds each."""
    points = {1: 1.0, MAX_ROWS: 1.0 + 0.02 * (MAX_ROWS - 1)}
    curve = MeasuredCurve({TREES: {(1, 256): points, (4, 256): points}}, MAX_ROWS)
    curve.add_trunks(lambda num_reqs: round_seconds)
    return Chooser(curve, {TREES: 16, TRUNKS: 16})


def choose(
    chooser: Chooser,
    rate: float,
    num_left: list[int],
    reading: list[float] | None = None,
    *,
    is_look: bool = False,
) -> list[bool]:
    load = Load(len(num_left), 256.0, sum(map(bool, num_left)))
    return chooser.choose_trunks(
        load,
        rate,
        num_left=np.array(num_left),
        reading=np.array(reading or [0.0] * len(num_left)),
        is_look=is_look,
    ).tolist()


def give(chooser: Chooser, num_reqs: int, rate: float, trunk_rate: float, *, steps: int) -> None:
    for _ in range(steps):
        chooser.record_trunks(Load(num_reqs, 256.0), rate, trunk_rate)


def test_rounds_are_left_out_where_steps_give_more_without():
    chooser = make_chooser()
    assert choose(chooser, 2.0, [MUCH]) == [True]  # nothing is known
    give(chooser, 1, 2.0, 1.2, steps=1)
    assert choose(chooser, 2.0, [MUCH]) == [True]  # one that gave little does not end all
    give(chooser, 1, 2.0, 1.2, steps=20)
    assert choose(chooser, 2.0, [MUCH]) == [False]
    assert choose(chooser, 2.0, [MUCH], is_look=True) == [True]
    # Of steps that give less without, and of another load, rounds are made.
    assert choose(chooser, 1.1, [MUCH]) == [True]
    assert choose(chooser, 2.0, [MUCH] * 4) == [True] * 4
    give(chooser, 1, 2.0, 2.4, steps=60)
    assert choose(chooser, 2.0, [MUCH]) == [True]
    assert choose(chooser, 2.5, [MUCH]) == [False]


def test_a_prompt_is_read_where_the_answer_gains_more_than_that_takes():
    chooser = make_chooser()
    gain = 100 * (1 / 0.5 - 1 / (0.5 * FIRST_GAIN))
    assert gain > STAKE
    give(chooser, 1, 0.5, 0.5 / (1 - 0.02), steps=200)  # now a token gains 0.04 seconds
    for reading, num_left, is_read in ((3.8, 100, True), (4.2, 100, False), (0.0, 1, True)):
        assert choose(chooser, 0.5, [num_left], [reading]) == [is_read]


def test_a_prompt_that_is_not_worth_it_leaves_the_others_their_round():
    chooser = make_chooser()
    assert choose(chooser, 8.0, [100, 100, 100, 0], [0.0, 20.0, 0.1, 0.0]) == [
        True,
        False,
        True,
        False,
    ]


def test_prompts_that_cannot_all_be_read_leave_the_others_their_round():
    assert choose(make_chooser(), 0.5, [MUCH, MUCH], [STAKE + 1, 0.0]) == [False, True]
    # As many as the account affords, of equal ones the first.
    num_read = int((STAKE * (1.0 + 0.02 * 7) - ROUND) / 1.5)
    chosen = [True] * num_read + [False] * (8 - num_read)
    assert choose(make_chooser(), 0.5, [MUCH] * 8, [1.5] * 8) == chosen


def test_what_rounds_gave_holds_for_other_numbers_of_requests():
    # Four and eight requests are counted together.
    chooser = make_chooser()
    give(chooser, 4, 4.0, 5.0, steps=60)
    assert choose(chooser, 7.5, [MUCH] * 8) == [True] * 8
    chooser = make_chooser()
    give(chooser, 8, 8.0, 6.0, steps=60)
    assert choose(chooser, 4.0, [MUCH] * 4) == [False] * 4


def test_no_round_takes_more_than_the_account_affords():
    chooser = make_chooser()
    assert choose(chooser, 0.01, [MUCH], [STAKE - ROUND - 0.01]) == [True]
    assert choose(chooser, 0.01, [MUCH], [STAKE - ROUND + 0.01]) == [False]
    assert choose(chooser, 0.01, [MUCH], [STAKE - ROUND + 0.01], is_look=True) == [False]
    chooser.account.credit = ROUND / 2
    assert choose(chooser, 0.5, [MUCH]) == [False]


@pytest.mark.parametrize("rows", [1, 5])
def test_rounds_are_paid_for_whatever_the_step_becomes(rows):
    chooser, load = make_chooser(), Load(1, 256.0, 1)
    before, [seconds] = chooser.account.credit, chooser.curve.at(TRUNKS, load, (rows,))
    assert seconds >= 1.0 + ROUND
    chooser.served(TRUNKS, load, rows, tokens=1, seconds=None, reading=0.5)
    assert chooser.account.credit - before == pytest.approx(1.0 - seconds - 0.5)
    assert chooser.curve.plain(load) == 1.0


@pytest.mark.parametrize("reading", [0.0, 3.0])
@pytest.mark.parametrize("believed_round", [ROUND, 0.01])
def test_a_draft_model_that_gives_nothing_costs_the_account_and_no_more(reading, believed_round):
    """It promises much, and nothing of it is accepted; trees without it are worth nothing."""
    chooser, load, lost = make_chooser(believed_round), Load(1, 256.0, 1), []
    for _ in range(2000):
        arm = chooser.look(load)
        is_look = arm is not None and arm[0] == TRUNKS
        may_draft = arm is None or is_look
        if may_draft and choose(chooser, 1.0, [MUCH], [reading], is_look=is_look)[0]:
            chooser.record_trunks(load, 1.0, 2.0)
            seconds = 1.0 + ROUND + 3 * 0.02
            measured = None if reading else seconds
            chooser.served(
                TRUNKS, load, 4, tokens=1, seconds=measured, reading=reading, expected=2.0
            )
            lost.append(seconds + reading - 1.0)
        else:
            chooser.served(None, load, 1, tokens=1, seconds=1.0)
    most_lost = STAKE + 2000 * EARNED + reading + 2 * ROUND
    assert 0 < sum(lost) <= 1.1 * most_lost


def test_drafts_of_one_node_say_nothing_of_rounds():
    chooser, load = make_chooser(), Load(1, 256.0, 1)
    [before] = chooser.curve.at(TRUNKS, load, (2,))
    for _ in range(64):
        chooser.served(None, load, 2, tokens=1, seconds=0.5, expected=0.9)
    assert chooser.curve.at(TRUNKS, load, (2,)) == [before]
    assert chooser.curve.at(TREES, load, (2,))[0] < before - ROUND
    assert chooser.trusts[TRUNKS].factor == 1.0 > chooser.trusts[TREES].factor


def test_what_a_round_takes_is_learnt_apart_from_trees():
    chooser, load = make_chooser(), Load(1, 256.0, 1)
    [trees] = chooser.curve.at(TREES, load, (5,))
    for _ in range(64):
        chooser.served(TRUNKS, load, 5, tokens=3, seconds=trees + 2 * ROUND, expected=2.0)
    [along_trunks] = chooser.curve.at(TRUNKS, load, (5,))
    assert along_trunks == pytest.approx(trees + 2 * ROUND, rel=0.05)
    assert chooser.curve.at(TREES, load, (5,)) == [trees]
