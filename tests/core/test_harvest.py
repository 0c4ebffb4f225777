"""Phrases from verification, against a plain reading of the rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import THOROUGH
from vllm_recycle.core.harvest import corrections_of_branches, phrases_of_trunk

tokens = st.integers(0, 2)  # few, so that draft and target agree often


@THOROUGH
@given(data=st.data(), rows=st.integers(2, 8))
def test_phrases_are_the_runs_along_which_the_draft_agrees(data, rows):
    length = data.draw(st.integers(2, rows))
    row = st.lists(tokens, min_size=rows, max_size=rows)
    drafts, sampled = data.draw(row), data.draw(row)
    verified = data.draw(st.integers(1, rows))
    owners, phrases = phrases_of_trunk(
        torch.tensor([drafts]), torch.tensor([sampled]), torch.tensor([verified]), length=length
    )
    expected = []
    for start in range(rows - length + 1):
        run = range(start, start + length - 1)
        agrees = all(sampled[i] == drafts[i + 1] for i in run)
        there = start + length <= verified
        expected.append(drafts[start] if agrees and there else -1)
    assert owners[0].tolist() == expected
    assert phrases[0].tolist() == [sampled[i : i + length] for i in range(rows - length + 1)]


def test_branches_are_corrected_by_what_the_target_said():
    branches = torch.tensor([[[5, 6, 7], [4, 6, 7], [-1, -1, -1]]])
    sampled = torch.tensor([[[6, 7, 2], [8, 9, 2], [0, 0, 0]]])
    arguments = (torch.tensor([3]), branches, torch.tensor([5]), sampled)
    owners, phrases = corrections_of_branches(*arguments, torch.tensor([True]))
    assert owners.tolist() == [[3, 3, -1]]
    assert phrases[0, :2].tolist() == [[5, 6, 7], [5, 8, 9]]
    owners, _ = corrections_of_branches(*arguments, torch.tensor([False]))
    assert owners.tolist() == [[-1, -1, -1]]
