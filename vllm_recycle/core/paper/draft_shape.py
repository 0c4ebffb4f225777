"""The sizes of a draft of Ouroboros, and what follows from them: two trees, and the phrase pool.

Drafting by phrases (arXiv 2402.13720, section 3.1) is lookahead decoding. A forward of the draft
model carries, behind the last token, a window of W columns by L - 2 levels, and the phrases that
followed the last token before, as guesses. What each of these rows may see, and its position, are
those of a tree below the last token, so that trees' masks, positions and walk serve here too:

    level 0 of the window     a chain, column w below column w - 1: guesses of the next W tokens
    level l > 0, column w     below level l - 1 of its column: the text going on from there
    each guess                a chain of its own

Names of dimensions, beside those of `core.tree` and `core.paper.phrase_pool`: `levels` L - 2 of the
paper, one less than the tokens of a phrase; `window` the paper's W; `guesses` its G.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_recycle.core.paper.phrase_pool import PhrasePool
from vllm_recycle.core.state_file import is_int
from vllm_recycle.core.tree import MAX_NODES, Node, TreeTemplate

MINIMUMS = {"gamma": 1, "window": 0, "guesses": 0, "phrase_length": 3, "branches": 0}


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The sizes of a draft, in the paper's terms, and how it is made and learnt from.

    Attributes:
        gamma: tokens that the draft model drafts in a round, the trunk.
        window: W, columns of the window; 0 for none.
        guesses: G, phrases tried in a draft forward; 0 for none.
        phrase_length: L, tokens of a phrase with the one that it follows.
        branches: K, phrases below the end of the trunk; 0 for none.
        max_forwards: draft forwards a round; None for as many as gamma tokens take. A trunk that is
            shorter then is filled up with the newest phrases.
        harvest_trunk: whether phrases come from what the target verified in the trunk (section
            3.3).
        harvest_branches: whether tried phrases are replaced by what the target said.

    A size out of range, or more rows than a tree may have, is a ValueError.
    """

    gamma: int
    window: int
    guesses: int
    phrase_length: int
    branches: int
    max_forwards: int | None = None
    harvest_trunk: bool = True
    harvest_branches: bool = True

    def __post_init__(self) -> None:
        for name, minimum in MINIMUMS.items():
            if not is_int(value := getattr(self, name), minimum):
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

    def tree(self) -> TreeTemplate:
        """What the target verifies: a trunk, and phrases below its end (section 3.2)."""
        nodes: list[Node] = [(row, 0) for row in range(self.gamma)]
        for branch in range(self.branches):
            self._add_phrase(nodes, (self.gamma, branch))
        name = f"ouroboros {self.gamma} + {self.branches} x {self.length}"
        return TreeTemplate(tuple(nodes), name)

    def lookahead(self) -> TreeTemplate:
        """The rows of a draft forward, below the last token: the window by levels, and guesses.

        Ranks only tell siblings apart.
        """
        window, levels = self.window, self.levels
        nodes: list[Node] = [(column, 0) for column in range(window)]
        # Column w of level 0 already has column w + 1 below it.
        for level in range(1, levels):
            first_parent = len(nodes) - window + 1
            nodes += [(first_parent + column, int(level == 1)) for column in range(window)]
        for guess in range(self.guesses):
            self._add_phrase(nodes, (0, 1 + guess))
        name = f"lookahead {window} x {levels}, {self.guesses} x {self.length}"
        return TreeTemplate(tuple(nodes), name)

    def _add_phrase(self, nodes: list[Node], first: Node) -> None:
        nodes.append(first)
        nodes += [(len(nodes) + place, 0) for place in range(self.length - 1)]

    def make_pool(self, num_owners: int, device: torch.device | str) -> PhrasePool:
        """The pool that drafts need, for so many tokens that phrases may follow."""
        per_token = max(self.guesses, self.branches, 1)
        return PhrasePool(num_owners, per_token=per_token, length=self.length, device=device)
