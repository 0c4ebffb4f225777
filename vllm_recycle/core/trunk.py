"""Drafting by a draft model and by context rows at once.

A draft model drafts a trunk, as in Ouroboros (arXiv 2402.13720, section 3.1), whose forwards it
saves by trying what is drafted for it in turn: here a chain from the adjacency matrix. The target
then verifies a tree that is grown along this trunk, of the draft model's choices and of what the
matrix knows beside and below them (`grow`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from vllm_recycle.core.acceptance import MOST_SEEN, PRIOR_WEIGHT
from vllm_recycle.core.adjacency import NUM_CLASSES, NUM_COUNTED, Ends
from vllm_recycle.core.grow import TextEnds, Trunks
from vllm_recycle.core.verification import NO_TOKEN

# Choices of the draft model at each place of a trunk, and the parts that its probabilities are told
# apart by.
CHOICES, PARTS = 3, 10


class DraftModel(Protocol):
    """The draft model and its KV cache, as one round finds them."""

    def choose(
        self,
        idx_mapping: torch.Tensor,
        new_token_ids: torch.Tensor,
        row_token_ids: torch.Tensor,
        choices: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward, which takes in what is new of each text and looks ahead of it.

        Args:
            idx_mapping: int64 [batch].
            new_token_ids: int64 [batch, n], the text behind what the last forward of this round
                took in, at least one token, padded with -1; in the first forward of a round the
                last token alone, before which the model may have more to take in.
            row_token_ids: int64 [batch, nodes], what it looks ahead at behind it, -1 for none.
            choices: tokens to choose.

        Returns:
            The most probable next tokens at the last token and at each node, int64 [batch, nodes +
            1, choices], best first, and how probable it finds each, float64; 0 where one is chosen
            alone.

        """


# What may follow some texts: of each a chain.
Guess = Callable[[TextEnds], list[list[int]]]


def draft_trunks(
    texts: TextEnds,
    model: DraftModel,
    guess: Guess,
    acceptance: ChoiceAcceptance,
    *,
    gamma: int,
    reach: int,
    least_chance: float = 0.0,
) -> Trunks:
    """Draft a trunk of at most gamma tokens below each text, by as many forwards as pay.

    A forward more pays as a row does: by the chance that what it adds is reached.

    Args:
        texts: of each of which a trunk is drafted, no longer than `max_depths`.
        model: what drafts.
        guess: what the model is to try below some texts, no deeper than their `max_depths`.
        acceptance: how often its choices were right.
        gamma: the most tokens of a trunk.
        reach: tokens at the end of a text that `guess` looks at.
        least_chance: a trunk goes on where the chance that all of it is right, times the trunks
            that share the forward, is no less than this.

    Returns:
        The trunks, with probabilities in the place of chances.

    """
    shape = len(texts.idx_mapping), gamma, CHOICES
    token_ids, chances = torch.full(shape, NO_TOKEN), torch.zeros(shape, dtype=torch.float64)
    tails = torch.tensor(texts.ends.tails(reach)).flip(1)
    # Tokens that each trunk may have still, and the chance that all it has are right.
    left = torch.tensor(texts.max_depths).clamp(max=gamma)
    lengths, survival = torch.zeros_like(left), torch.ones(len(left), dtype=torch.float64)
    active = left.nonzero().flatten()
    new_token_ids = tails[active, -1:]
    while len(active):
        idx_mapping = texts.idx_mapping[active]
        ends = Ends(tails[active].int(), [reach - 1] * len(active))
        # At the last token that is guessed the model says one more.
        guesses = _padded(guess(TextEnds(idx_mapping, ends, (left[active] - 1).tolist())))
        choices, probs = model.choose(idx_mapping, new_token_ids, guesses, CHOICES)
        is_right = guesses == choices[:, :-1, 0]
        is_new = torch.nn.functional.pad(is_right, (1, 0), value=True).cumprod(dim=1) > 0
        index, row = is_new.nonzero().unbind(dim=1)
        place = active[index], lengths[active[index]] + row
        token_ids[place], chances[place] = choices[index, row], probs[index, row]
        chance = acceptance.chances(Trunks(choices, probs), idx_mapping).chances[:, :, 0]
        survival[active] *= chance.where(is_new, 1.0).prod(dim=1)
        num_new = is_new.sum(dim=1)
        lengths[active] += num_new
        left[active] -= num_new
        new_token_ids = choices[:, :, 0].where(is_new, NO_TOKEN)
        longer_tails = torch.cat((tails[active], new_token_ids), dim=1)
        tails[active] = longer_tails.gather(1, torch.arange(reach) + num_new[:, None])
        pays = _pays(survival[active].where(left[active] > 0, 0.0), least_chance)
        active, new_token_ids = active[pays], new_token_ids[pays]
    return Trunks(token_ids, chances)


def _pays(survival: torch.Tensor, least_chance: float) -> torch.Tensor:
    """The most trunks, the surest ones, that each pay an equal part of a forward, bool [n].

    Of survival, float64 [n], 0 where a trunk is whole.
    """
    ranked, order = survival.sort(descending=True, stable=True)
    counts = torch.arange(1, 1 + len(survival))
    num_paying = counts.where((ranked > 0) & (counts * ranked >= least_chance), 0).max()
    return torch.zeros_like(survival, dtype=torch.bool).index_fill_(0, order[:num_paying], True)


def _padded(rows: list[list[int]]) -> torch.Tensor:
    """int64 [batch, max_length], padded with -1."""
    max_length = max(map(len, rows))
    return torch.tensor([[*row, *[NO_TOKEN] * (max_length - len(row))] for row in rows]).long()


class ChoiceAcceptance:
    """How often a draft model's choices were right where the trunk before them was.

    Nothing of it waits for a device.

    Args:
        classes: int64 [max_num_reqs], of the requests, see `AdjacencyMatrix`.
        choices: at each place of a trunk.

    Attributes:
        counts: float64 [classes, choices, PARTS, 2], for each choice, by the probability that the
            model gave it, how often it was right, and how often it was seen.
        has_probabilities: whether choices have probabilities; else their places tell them apart.

    """

    def __init__(self, classes: torch.Tensor, choices: int = CHOICES) -> None:
        self.classes, self.has_probabilities = classes, True
        shape, device = (NUM_CLASSES, choices, PARTS, 2), classes.device
        self.counts = torch.zeros(shape, dtype=torch.float64, device=device)
        self._choices = torch.arange(choices, device=device)

    def clear(self) -> None:
        """Forget everything."""
        self.counts.zero_()

    def halve(self) -> None:
        """Let what was counted weigh half as much beside what will be."""
        self.counts *= 0.5

    def chances(self, trunks: Trunks, idx_mapping: torch.Tensor) -> Trunks:
        """Chances in the place of probabilities, which are believed where little was seen.

        Where there is no token, the chance is 0.

        Args:
            trunks: with probabilities.
            idx_mapping: int64 [batch], the `req_state_idx` of each trunk.

        """
        probabilities = trunks.chances
        cells = self._cells(probabilities, self.classes[idx_mapping.long()])
        right, seen = self.counts.view(-1, 2)[cells].unbind(-1)
        chances = (right + PRIOR_WEIGHT * probabilities) / (seen + PRIOR_WEIGHT)
        chances = chances.where(trunks.token_ids != NO_TOKEN, 0.0)
        return trunks._replace(chances=chances.to(probabilities.dtype))

    def count(self, trunks: Trunks, idx_mapping: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Take in what followed each text.

        Args:
            trunks, idx_mapping: as for `chances`.
            token_ids: integer [batch, n], padded with -1.

        """
        gamma = trunks.token_ids.shape[1]
        num_missing = max(0, gamma - token_ids.shape[1])
        follows = torch.nn.functional.pad(token_ids, (0, num_missing), value=NO_TOKEN)[:, :gamma]
        classes = self.classes[idx_mapping.long()]
        has_token = trunks.token_ids != NO_TOKEN
        was_right = has_token & (trunks.token_ids == follows[:, :, None])
        # All before a place.
        is_reached = torch.nn.functional.pad(was_right[:, :-1, 0], (1, 0), value=True)
        is_reached = (is_reached.cumprod(dim=1) > 0) & (follows != NO_TOKEN)
        is_reached &= classes[:, None] < NUM_COUNTED
        seen = is_reached[:, :, None] & has_token
        outcomes = torch.stack((was_right & seen, seen), dim=-1).double()
        increments = torch.zeros_like(self.counts).view(-1, 2)
        cells = self._cells(trunks.chances, classes)
        increments.index_add_(0, cells.flatten(), outcomes.flatten(0, -2))
        self.counts += increments.view_as(self.counts)
        self.counts /= 1 + (self.counts[..., 1:] > MOST_SEEN)

    def _cells(self, probabilities: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Where in the counts each choice of some trunks is, int64 [batch, n, choices]."""
        first_cells = classes[:, None, None] * len(self._choices)
        return (first_cells + self._choices) * PARTS + self._parts(probabilities)

    def _parts(self, probabilities: torch.Tensor) -> torch.Tensor:
        if not self.has_probabilities:
            place = torch.arange(probabilities.shape[1], device=probabilities.device)
            return place.clamp(max=PARTS - 1)[:, None].expand(probabilities.shape)
        # Rounds that warm up have read what was never written.
        return (probabilities * PARTS).nan_to_num().long().clamp(min=0, max=PARTS - 1)
