"""Copies of a request's own text: where they stand, and what trees along them are worth."""

from __future__ import annotations

import torch

from tests.core.recycling_steps import K, ends_of, started, write_entries
from vllm_recycle.core.adjacency import GREEDY, NUM_CLASSES, Ends
from vllm_recycle.core.copies import Copies, draft_copies, find_place, learn_copies
from vllm_recycle.core.grow import NO_PLACE, TextEnds, Trunks, grow
from vllm_recycle.core.verification import NO_TOKEN


def test_a_place_is_the_nearest_to_the_last_copy():
    text = torch.tensor([1, 2, 3, 4, 5, *[0] * 80, 1, 2, 3, 4, 6, *[7] * 9, 1, 2, 3, 4])
    place, match = find_place(text, 3, min_match=4)
    assert (place, match) == (4, 4)
    assert find_place(text, -1, min_match=4) == (89, 4)
    assert find_place(text, -1, min_match=5) == (NO_PLACE, 0)
    assert find_place(text, 3, min_match=5) == (4, 4)  # near enough


def drafted(copies: Copies, text: list[int]) -> tuple[list[int], Ends]:
    """The trunk of a text, and its end."""
    ends = Ends(torch.tensor([text], dtype=torch.int32), [len(text) - 1])
    [trunk] = draft_copies(copies, torch.tensor([0]), ends).token_ids[:, :, 0].tolist()
    return trunk[: (*trunk, NO_TOKEN).index(NO_TOKEN)], ends


def test_a_hint_is_copied_from_as_far_as_it_goes():
    copies = Copies(torch.tensor([GREEDY]), 3)
    copies.begin(0, [9, 1, 2, 3, 4, 5, 6, 7, 8, -1, 1, 2])
    assert drafted(copies, [8, 1, 2, 3, 4])[0] == [5, 6, 7]
    assert drafted(copies, [5, 6, 7, 8])[0] == []
    copies.begin(0)
    assert drafted(copies, [8, 1, 2, 3, 4])[0] == []


def test_a_copy_stands_where_it_was_right_and_its_chances_follow():
    copies, text = Copies(torch.tensor([GREEDY]), 5), [*range(1, 20), *range(1, 9)]
    trunk, ends = drafted(copies, text)
    assert trunk == [9, 10, 11, 12, 13]
    learn_copies(copies, torch.tensor([0]), ends, torch.tensor([[9, 10, 30]]))
    assert copies.stands.tolist() == [10]
    right, seen = copies.acceptance.counts.sum((0, 1, 2)).tolist()
    assert (right, seen) == (2, 3)


def test_trees_follow_a_shared_entry_that_is_surer_than_a_trunk():
    """But not one of the text itself."""
    for own, token in ((False, 3), (True, 2)):
        matrix = started("sequence", contexts=(1,))
        write_entries(matrix, [1], int(matrix.salts[0]), [3, 4, 5], own=own, shared=not own)
        rates = torch.full((NUM_CLASSES, 1, 2, K, 4), 0.125)
        rates[:, :, :, 0] = 0.75
        trunks = Trunks(torch.tensor([[[2]]]), torch.tensor([[[0.5]]]))
        ends = TextEnds(torch.tensor([0]), ends_of([[1]]), [1], trunks)
        growth = grow(matrix, rates, ends, max_nodes=3)
        assert growth.token_ids[0, 0] == token
        assert sorted(growth.token_ids[0].tolist()) == [2, 3, 4]
