"""The sizes of a draft of Ouroboros, and the two trees that follow from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from vllm_recycle.core.lookahead import lengthened_template, lookahead_template
from vllm_recycle.core.state_file import is_int
from vllm_recycle.core.tree import MAX_NODES, TreeTemplate


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The sizes of a draft, in the paper's terms.

    Attributes:
        gamma: tokens that the draft model drafts in a round, the trunk.
        window: W, columns of the window; 0 for none.
        guesses: G, phrases tried in a draft forward; 0 for none.
        phrase_length: L, tokens of a phrase with the one that it follows.
        branches: K, phrases below the end of the trunk; 0 for none.

    A size out of range, or more rows than a tree may have, is a ValueError.
    """

    gamma: int
    window: int
    guesses: int
    phrase_length: int
    branches: int

    def __post_init__(self) -> None:
        minimums = {"gamma": 1, "phrase_length": 3}
        for name in (field.name for field in dataclasses.fields(self)):
            value, minimum = getattr(self, name), minimums.get(name, 0)
            if not is_int(value, minimum):
                raise ValueError(f"{name} is {value!r}, expected an integer from {minimum}")
        if not self.window + self.guesses:
            raise ValueError(
                "window and guesses are both 0, expected more of one of them; without both this is "
                "vLLM's method draft_model"
            )
        rows = {
            "window * (phrase_length - 2) + guesses * (phrase_length - 1)": self.window
            * self.levels
            + self.guesses * self.length,
            "gamma + branches * (phrase_length - 1)": self.num_nodes,
        }
        for name, value in rows.items():
            if value > MAX_NODES:
                raise ValueError(f"{name} is {value}, expected at most {MAX_NODES}")

    @property
    def length(self) -> int:
        """Tokens of a phrase behind the one that it follows, the paper's beta."""
        return self.phrase_length - 1

    @property
    def levels(self) -> int:
        """Levels of the window."""
        return self.phrase_length - 2

    @property
    def num_nodes(self) -> int:
        """Nodes of `tree`."""
        return self.gamma + self.branches * self.length

    @property
    def num_runs(self) -> int:
        """Phrases that the last token and the trunk may hold."""
        return max(0, self.gamma + 2 - self.length)

    def tree(self) -> TreeTemplate:
        """What the target verifies."""
        return lengthened_template(gamma=self.gamma, branches=self.branches, length=self.length)

    def lookahead(self) -> TreeTemplate:
        """The rows of a draft forward, below the last token."""
        return lookahead_template(
            window=self.window, levels=self.levels, guesses=self.guesses, length=self.length
        )
