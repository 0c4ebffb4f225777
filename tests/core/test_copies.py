"""Copies of a request's own text: where they stand, and what trees along them are worth."""

from __future__ import annotations

import torch

from vllm_recycle.core.copies import find_place


def test_a_place_is_the_nearest_to_the_last_copy():
    text = torch.tensor([1, 2, 3, 4, 5, *[0] * 80, 1, 2, 3, 4, 6, *[7] * 9, 1, 2, 3, 4])
    place, match = find_place(text, 3)
    assert (place, match) == (4, 4)
    assert find_place(text, -1) == (89, 4)
