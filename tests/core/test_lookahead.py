"""The rows of a draft forward, and the window, against the rules of lookahead decoding by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import BRIEF, THOROUGH, paths_of
from vllm_recycle.core.lookahead import advance_window, lengthened_template, lookahead_template

sizes = st.fixed_dictionaries(
    {
        "window": st.integers(1, 5),
        "levels": st.integers(1, 4),
        "guesses": st.integers(0, 3),
        "length": st.integers(1, 4),
    }
)


def names(window: int, levels: int, guesses: int, length: int) -> list[tuple]:
    """What each row of the template is, the last token first."""
    columns = [("window", level, column) for level in range(levels) for column in range(window)]
    tried = [("guess", guess, place) for guess in range(guesses) for place in range(length)]
    return [("last",), *columns, *tried]


def sees(row: tuple, other: tuple) -> bool:
    """Whether a row attends to another, by the rules of lookahead decoding."""
    if other == ("last",):
        return True
    if row[0] != other[0]:
        return False
    if row[0] == "guess":
        return row[1] == other[1] and row[2] >= other[2]
    _, level, column = row
    _, other_level, other_column = other
    in_first_level = other_level == 0 and other_column <= column
    return in_first_level or (other_column == column and other_level <= level)


def distance(row: tuple) -> int:
    """How far behind the last token a row stands."""
    if row == ("last",):
        return 0
    return 1 + (row[2] if row[0] == "guess" else row[1] + row[2])


@BRIEF
@given(size=sizes)
def test_a_draft_forward_is_a_tree_below_the_last_token(size):
    tree, rows = lookahead_template(**size), names(**size)
    assert tree.num_nodes == len(rows) - 1
    expected = [[sees(row, other) for other in rows] for row in rows]
    assert tree.ancestor_mask.tolist() == expected
    assert tree.depths.tolist() == [distance(row) for row in rows]


@BRIEF
@given(gamma=st.integers(1, 6), branches=st.integers(0, 3), length=st.integers(1, 4))
def test_branches_hang_below_the_end_of_the_trunk(gamma, branches, length):
    tree = lengthened_template(gamma=gamma, branches=branches, length=length)
    assert tree.num_nodes == gamma + branches * length
    paths = paths_of(tree)
    assert paths[gamma] == list(range(gamma + 1))
    first = gamma + 1
    for _ in range(branches):
        below = list(range(first, first + length))
        assert paths[below[-1]] == [*range(gamma + 1), *below]
        first += length


@THOROUGH
@given(
    window=st.integers(1, 4), levels=st.integers(1, 4), steps=st.integers(1, 8), seed=st.integers(0)
)
def test_columns_become_phrases_as_in_a_plain_loop(window, levels, steps, seed):
    generator = torch.Generator().manual_seed(seed % 2**31)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(100, shape, generator=generator)

    # Two sequences, of which the second began a step later.
    state = tokens(2, levels, window)
    num_filled = torch.tensor([min(2, levels), 1])
    by_hand = [state[i, : num_filled[i]].tolist() for i in range(2)]
    for _ in range(steps):
        outputs, last = tokens(2, levels, window), tokens(2)
        state, filled, owners, phrases = advance_window(state, num_filled, outputs, last)
        for i, known in enumerate(by_hand):
            new = outputs[i, len(known) - 1].tolist()
            if len(known) == levels:
                before = [int(last[i]), *known[0][:-1]]
                assert owners[i].tolist() == before
                columns = [list(column) for column in zip(*known, new, strict=True)]
                assert phrases[i].tolist() == columns
                known.pop(0)
            else:
                assert owners[i].tolist() == [-1] * window
            known.append(new)
            assert filled[i] == len(known)
            assert state[i, : len(known)].tolist() == known
        num_filled = filled
