"""Grammars as drafting sees them: what they allow at each row, and what is expected there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from vllm_recycle.core.verification import NO_TOKEN


class Allowed(NamedTuple):
    """What a grammar allows at a row.

    Attributes:
        words: int32 [words]; token t is allowed where bit t % 32 of word t // 32 is set.
        expected: an allowed token that is to be expected there, if any; else -1.

    """

    words: torch.Tensor
    expected: int = NO_TOKEN

    def has(self, token: int) -> bool:
        """Whether a token is allowed."""
        word = token // 32
        return word < len(self.words) and bool(int(self.words[word]) >> token % 32 & 1)


class Grammar(Protocol):
    """What a text has to follow, looked at ahead of its end."""

    def allowed(self, path: Sequence[int]) -> Allowed | None:
        """What is allowed behind a path of tokens below the text; None where that is not said.

        While a draft is made it says the same of a path whenever it is asked.
        """


def keep_allowed(followers: list[tuple[int, float]], allowed: Allowed) -> list[tuple[int, float]]:
    """What may follow under a grammar, and the chance of each; see `grow.grow`."""
    tokens = [token for token, _ in followers if allowed.has(token)]
    followers = list(zip(tokens, (chance for _, chance in followers), strict=False))
    if allowed.expected == NO_TOKEN:
        return followers
    pairs, rest_chance = [pair for pair in followers if pair[0] != allowed.expected], 1.0
    for _, chance in pairs:  # not `sum`, which rounds otherwise from Python 3.12 on
        rest_chance -= chance
    return sorted([*pairs, (allowed.expected, max(0.0, rest_chance))], key=lambda pair: -pair[1])
