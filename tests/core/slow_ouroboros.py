"""Ouroboros (arXiv 2402.13720) as plainly as it can be written, for tests to compare with.

Greedy, on transformers models, one sequence at a time. Every forward computes its whole text again,
and loops and lists stand where the package has tensors. Deliberately nothing of vllm_recycle is
imported: what agrees with this was written twice.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch

Phrase = tuple[int, ...]


def load(path: str | Path) -> Any:
    """A model to decode with."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@dataclass
class Round:
    """What one round drafted and brought."""

    draft_forwards: int
    trunk: list[int]
    branches: list[Phrase]  # the newest phrase first
    new_tokens: list[int]  # accepted ones and the free one


@dataclass
class Sequence:
    """A text, and what lookahead decoding keeps of it between draft forwards."""

    token_ids: list[int]
    window: list[list[int]]  # the filled levels, each of W tokens


class Rows:
    """The rows of one forward: a text, and behind it rows that see the text and chosen others."""

    def __init__(self, text: list[int]) -> None:
        self.text_length = len(text)
        self.token_ids = list(text)
        self.positions = list(range(len(text)))
        self.sees: list[list[int]] = []  # of each row behind the text, beside it

    def add(self, token_id: int, *, position: int, sees: list[int]) -> int:
        """Add a row that sees the text, the rows `sees` and itself; return its number."""
        row = len(self.token_ids)
        self.token_ids.append(token_id)
        self.positions.append(position)
        self.sees.append([*sees, row])
        return row

    def add_chain(self, phrase: Phrase, *, below: list[int] | None = None) -> list[int]:
        """Add a continuation of the text, or of the rows of one, token by token."""
        chain = list(below or [])
        for token_id in phrase:
            position = self.text_length + len(chain)
            chain.append(self.add(token_id, position=position, sees=list(chain)))
        return chain

    def outputs(self, model: Any) -> list[int]:
        """Return the most probable next token of each row."""
        return self.logits(model).argmax(dim=-1).tolist()

    @torch.no_grad()
    def logits(self, model: Any, known: int = 0, **given: Any) -> torch.Tensor:
        """Return what the model says behind each row but the first ones, if it knows those."""
        first, unseen = self.text_length, torch.finfo(torch.float32).min
        mask = torch.full([len(self.token_ids)] * 2, unseen).triu(1)
        mask[first:, first:] = unseen
        for row, seen in enumerate(self.sees, first):
            mask[row, seen] = 0.0
        token_ids, positions = torch.tensor([self.token_ids, self.positions])[:, None, known:]
        given |= {"attention_mask": mask[None, None, known:], "position_ids": positions}
        return model(token_ids, **given).logits[0]

    def longest_walk(self, start: int, chains: list[list[int]], outputs: list[int]) -> list[int]:
        """The rows from `start` down the chain that agrees longest, the first of equals."""
        longest = [start]
        for chain in chains:
            visited = [start]
            for row in chain:
                if self.token_ids[row] != outputs[visited[-1]]:
                    break
                visited.append(row)
            if len(visited) > len(longest):
                longest = visited
        return longest


@dataclass
class SlowOuroboros:
    """Two models, and the phrase pool that all their sequences share."""

    target: Any
    draft: Any
    _: KW_ONLY
    gamma: int
    window: int
    guesses: int
    phrase_length: int
    branches: int
    max_forwards: int | None = None
    harvest_trunk: bool = True
    harvest_branches: bool = True
    pool: dict[int, list[Phrase]] = field(default_factory=dict, init=False)  # newest last

    def __post_init__(self) -> None:
        self.beta, self.levels = self.phrase_length - 1, self.phrase_length - 2

    def begin_behind(self, prompt_token_ids: list[int]) -> Sequence:
        """Start a sequence with the token that ends the prompt's own step.

        Its window is of one level, which is filled from the prompt.
        """
        length = len(prompt_token_ids)
        places = torch.rand(self.window, generator=torch.Generator().manual_seed(0)) * length
        level = [prompt_token_ids[min(int(place), length - 1)] for place in places]
        first = Rows(prompt_token_ids).outputs(self.target)[-1]
        return Sequence([*prompt_token_ids, first], [level])

    def step(self, sequence: Sequence, *, most_nodes: int | None = None) -> Round:
        """One round: draft, verify, harvest, and lengthen the sequence.

        Of the trunk, and of the branches behind it, only the first nodes are verified where the
        step has no room for more.
        """
        text, gamma = sequence.token_ids, self.gamma
        trunk, draft_forwards = self.draft_trunk(sequence)
        branches = self.phrases_of(trunk[-1])[: self.branches] if len(trunk) == gamma else []

        most_nodes = gamma + self.branches * self.beta if most_nodes is None else most_nodes
        rows, root = Rows(text), len(text) - 1
        trunk_rows = rows.add_chain(tuple(trunk[:most_nodes]))
        chains = []
        for number, branch in enumerate(branches):
            left = max(0, most_nodes - gamma - number * self.beta)
            chains.append(rows.add_chain(branch[:left], below=trunk_rows))
        outputs = rows.outputs(self.target)
        visited = rows.longest_walk(root, [trunk_rows, *chains], outputs)

        said = [outputs[row] for row in [root, *trunk_rows]]
        if self.harvest_trunk:
            self.harvest_from_trunk([text[-1], *trunk[:most_nodes]], said)
        if self.harvest_branches and said[:-1] == trunk:
            tried = [chain for chain in chains if len(chain) == gamma + self.beta]
            for branch in branches[: len(tried)]:
                self.remove(trunk[-1], branch)
            for chain in tried[::-1]:  # the oldest first
                self.insert(trunk[-1], tuple(outputs[row] for row in chain[gamma - 1 : -1]))
        new_tokens = [outputs[row] for row in visited]
        text += new_tokens
        return Round(draft_forwards, trunk, branches, new_tokens)

    def draft_trunk(self, sequence: Sequence) -> tuple[list[int], int]:
        """Draft forwards until there are gamma tokens, or phrases where forwards ran out."""
        text = sequence.token_ids
        trunk: list[int] = []
        forwards = 0
        while len(trunk) < self.gamma and forwards != self.max_forwards:
            trunk += self.draft_forward(text + trunk, sequence.window)
            forwards += 1
        while len(trunk) < self.gamma and (phrases := self.phrases_of((text + trunk)[-1])):
            trunk += phrases[0]
        return trunk[: self.gamma], forwards

    def draft_forward(self, text: list[int], window: list[list[int]]) -> list[int]:
        """One forward of lookahead decoding: return the confirmed tokens, advance the window."""
        rows = Rows(text)
        cells: list[list[int]] = []  # the row of each window token
        for level, token_ids in enumerate(window):
            cells.append([])
            for column, token_id in enumerate(token_ids):
                sees = cells[0][: column + 1] + [cell[column] for cell in cells[1:level]]
                position = len(text) + column + level
                cells[level].append(rows.add(token_id, position=position, sees=sees))
        newest = self.phrases_of(text[-1])[: self.guesses]
        guesses = [rows.add_chain(phrase) for phrase in newest]
        outputs = rows.outputs(self.draft)
        self.advance(window, [outputs[row] for row in cells[-1]], text[-1])
        return [outputs[row] for row in rows.longest_walk(len(text) - 1, guesses, outputs)]

    def advance(self, window: list[list[int]], newest: list[int], last_token: int) -> None:
        """Give the window its next level; once it is full, its columns are phrases and it moves."""
        if len(window) == self.levels:
            for column, owner in enumerate([last_token, *window[0]][: len(newest)]):
                self.insert(owner, tuple(level[column] for level in [*window, newest]))
            del window[0]
        window.append(newest)

    def harvest_from_trunk(self, token_ids: list[int], said: list[int]) -> None:
        """Enter the runs of the target's tokens along which the trunk agreed."""
        for start in range(len(token_ids) - self.beta + 1):
            inside = range(start + 1, start + self.beta)
            if all(token_ids[row] == said[row - 1] for row in inside):
                self.insert(token_ids[start], tuple(said[start : start + self.beta]))

    def phrases_of(self, token_id: int) -> list[Phrase]:
        """The phrases of a token, the newest first."""
        return self.pool.get(token_id, [])[::-1]

    def insert(self, token_id: int, phrase: Phrase) -> None:
        self.remove(token_id, phrase)
        phrases = self.pool.setdefault(token_id, [])
        phrases.append(phrase)
        del phrases[: -max(self.guesses, self.branches, 1)]

    def remove(self, token_id: int, phrase: Phrase) -> None:
        if phrase in self.pool.get(token_id, []):
            self.pool[token_id].remove(phrase)
