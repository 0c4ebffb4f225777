"""Copies: trunks from the text of a request itself, where it goes on as it did before.

Edits, quotes and agents repeat what stands in their prompts. The place of a copy is where the last
tokens of a text stood before, with the longest match; of equal matches it is the nearest to where
the last copy stood. So a copy goes on behind a change, and not at the newest place that looks
alike. What follows the place is a trunk of `grow.grow`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_recycle.core.adjacency import Ends
from vllm_recycle.core.grow import NO_PLACE, Trunks
from vllm_recycle.core.trunk import PARTS, ChoiceAcceptance
from vllm_recycle.core.verification import NO_TOKEN

# The most tokens of a trunk, and of a match.
MAX_TRUNK, MAX_MATCH = 63, 64
# Places need matches of as many tokens, unless they are as near to where the last copy stood. Rows
# cost more on a CPU, where shorter matches lose in free text.
MIN_MATCH, MIN_MATCH_CPU, NEAR = 4, 8, 64
# A match of as many tokens is a copy, which later places are near to.
MIN_COPY = 8
# Matches are told apart as 1, 2, 3, 4 to 7, 8 to 15, ...; they have the last ones of `PARTS`.
FIRST_PART = PARTS - 8


class Copies:
    """Where the last copy of each request stood, and how often texts went on like their copies.

    Args:
        classes: int64 [max_num_reqs], of the requests, see `AdjacencyMatrix`.
        length: the most tokens of a trunk.
        min_match: the fewest tokens of a match, unless it is near to the last copy.
        counts: whether it is counted how often trunks are right.

    Attributes:
        acceptance: of the tokens of trunks, by the lengths of their matches.
        stands: int64 [max_num_reqs], where the last copy went on; -1 for none.
        places: int64 [max_num_reqs], where the last trunk starts; -1 for none.
        matches: int64 [max_num_reqs], the length of its match.
        hints: by `req_state_idx`, int32 [n], what a request may copy from besides; it stands before
            the text, and places count from its start.

    """

    def __init__(
        self,
        classes: torch.Tensor,
        length: int,
        *,
        min_match: int = MIN_MATCH,
        counts: bool = True,
    ) -> None:
        self.acceptance = ChoiceAcceptance(classes, choices=1)
        self.length, self.min_match, self.counts = min(length, MAX_TRUNK), min_match, counts
        self.stands = torch.full_like(classes, NO_PLACE)
        self.places = torch.full_like(classes, NO_PLACE)
        self.matches = torch.zeros_like(classes)
        self.hints: dict[int, torch.Tensor] = {}

    def begin(self, req_state_idx: int, hint: Sequence[int] = ()) -> None:
        """A request starts, or goes on after it was preempted."""
        self.stands[req_state_idx] = self.places[req_state_idx] = NO_PLACE
        self.hints.pop(req_state_idx, None)
        if hint:
            self.hints[req_state_idx] = torch.tensor(hint, dtype=torch.int32)

    def texts(self, idx_mapping: torch.Tensor, ends: Ends) -> list[torch.Tensor]:
        """Of each request its hint and its text, int32 [n], -1 where there is no token.

        A request whose last position is -1 gets no draft, and none of its text.
        """
        texts = []
        for b, (index, last) in enumerate(
            zip(idx_mapping.tolist(), ends.last_positions, strict=True)
        ):
            text = ends.token_ids[b, : last + 1]
            if ends.is_token is not None:
                text = text.where(ends.is_token[b, : last + 1], NO_TOKEN)
            hint = text[:0] if last < 0 else self.hints.get(index, text[:0])
            texts.append(torch.cat((hint, text)))
        return texts

    def trunks(self, idx_mapping: torch.Tensor, ends: Ends) -> Trunks:
        """The last trunk of each request, [batch, length, 1], with probabilities for chances."""
        token_ids = torch.full((len(idx_mapping), self.length, 1), NO_TOKEN)
        probabilities = torch.zeros(token_ids.shape, dtype=torch.float64)
        for b, text in enumerate(self.texts(idx_mapping, ends)):
            place = int(self.places[idx_mapping[b]])
            if place == NO_PLACE:
                continue
            trunk = text[place : place + self.length]
            matches = self.matches[idx_mapping[b]] + torch.arange(len(trunk))
            token_ids[b, : len(trunk), 0] = trunk
            probabilities[b, : len(trunk), 0] = (parts_of(matches).double() + 0.5) / PARTS
        return Trunks(token_ids, probabilities)


def draft_copies(copies: Copies, idx_mapping: torch.Tensor, ends: Ends) -> Trunks:
    """Draft a trunk below the last token of each text.

    Args:
        copies: what it is drafted by; keeps the places.
        idx_mapping: int64 [batch].
        ends: of the texts.

    Returns:
        Trunks of one choice, [batch, length, 1].

    """
    for index, text in zip(idx_mapping.tolist(), copies.texts(idx_mapping, ends), strict=True):
        place, match = find_place(text, int(copies.stands[index]), copies.min_match)
        copies.places[index], copies.matches[index] = place, match
    return copies.acceptance.chances(copies.trunks(idx_mapping, ends), idx_mapping)


def learn_copies(
    copies: Copies, idx_mapping: torch.Tensor, ends: Ends, token_ids: torch.Tensor
) -> None:
    """Take in what followed each text.

    Args:
        copies, idx_mapping, ends: as for `draft_copies`.
        token_ids: int64 [batch, n], padded with -1.

    """
    trunks = copies.trunks(idx_mapping, ends)
    if copies.counts:
        copies.acceptance.count(trunks, idx_mapping, token_ids)
    size = min(copies.length, token_ids.shape[1])
    trunk_ids = trunks.token_ids[:, :size, 0]
    is_right = (trunk_ids == token_ids[:, :size]) & (trunk_ids != NO_TOKEN)
    num_right = is_right.cumprod(dim=1).sum(dim=1)
    is_copy = (num_right > 0) & (copies.matches[idx_mapping] + num_right >= MIN_COPY)
    places = copies.places[idx_mapping] + num_right
    copies.stands[idx_mapping] = places.where(is_copy, copies.stands[idx_mapping])
    copies.places[idx_mapping] = NO_PLACE


def find_place(text: torch.Tensor, stand: int, min_match: int) -> tuple[int, int]:
    """Where a copy goes on, and the length of its match; -1 and 0 where nothing matches.

    Args:
        text: integer [n], -1 where there is no token.
        stand: where the last copy went on; -1 for none, and then the newest place is the nearest.
        min_match: see `Copies`.

    """
    last = len(text) - 1
    if last < 1 or int(text[last]) == NO_TOKEN:
        return NO_PLACE, 0
    places = 1 + (text[:-1] == text[last]).nonzero()[:, 0]
    matches, is_match = torch.ones_like(places), torch.ones_like(places, dtype=torch.bool)
    for length in range(1, min(MAX_MATCH, last)):
        position = places - 1 - length
        token_ids = text[position.clamp(min=0)]
        is_match &= (position >= 0) & (token_ids == text[last - length]) & (token_ids != NO_TOKEN)
        matches += is_match
    distances = (places - stand).abs() if stand >= 0 else len(text) - places
    is_near = distances <= NEAR if stand >= 0 else torch.zeros_like(is_match)
    fits = (matches >= min_match) | is_near
    columns = (values[fits].tolist() for values in (matches, -distances, places))
    match, _, place = max(zip(*columns, strict=True), default=(0, 0, NO_PLACE))
    return place, match


def parts_of(matches: torch.Tensor) -> torch.Tensor:
    """The part that matches of some lengths, from 1, are counted in."""
    exponents = matches.clamp(max=MAX_MATCH).double().log2().long()
    return FIRST_PART + torch.where(matches < 4, matches - 1, exponents + 1)
