"""What trees are grown from, for the tests of the core and of the kernels."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tests.core.recycling_steps import K, ends_of, make_matrix, write_entries
from vllm_recycle.core.adjacency import NUM_CLASSES, NUM_COUNTED, SCOPES, AdjacencyMatrix
from vllm_recycle.core.grammar import Allowed
from vllm_recycle.core.grow import Growth, TextEnds, Trunks, grow
from vllm_recycle.core.owners import Owner

TOKENS = 4


@dataclass(frozen=True)
class SomeGrammar:
    """Allows about two thirds of the tokens behind a path, which are others behind each."""

    seed: int
    tokens: int

    def allowed(self, path: Sequence[int]) -> Allowed | None:
        choose = random.Random(repr((self.seed, *path)))
        some = [token for token in range(self.tokens) if choose.random() < 2 / 3]
        words = torch.tensor([sum(1 << token for token in some)], dtype=torch.int32)
        expected = choose.choice([-1, *some])
        return choose.choice([None, Allowed(words), Allowed(words, expected)])


def some_grammars(batch: int, *, tokens: int = TOKENS) -> st.SearchStrategy:
    """Of each text one, or none."""
    one = st.none() | st.builds(SomeGrammar, st.integers(0, 999), st.just(tokens))
    return st.none() | st.lists(one, min_size=batch, max_size=batch)


@dataclass(frozen=True)
class Setting:
    """What trees are grown from."""

    matrix: AdjacencyMatrix
    rates: torch.Tensor
    texts: list[list[int]]
    max_depths: list[int]
    max_nodes: int
    beam: int | None = None
    levels: int | None = None
    trunks: Trunks | None = None
    grammars: list[SomeGrammar | None] | None = None

    @property
    def arguments(self) -> tuple:
        ends, of_texts = ends_of(self.texts), (self.max_depths, self.trunks, self.grammars)
        texts = TextEnds(torch.arange(len(self.texts)), ends, *of_texts)
        return self.matrix, self.rates, texts

    def grow(self, **options) -> Growth:
        options = {"beam": self.beam, "levels": self.levels, **options}
        return grow(*self.arguments, max_nodes=self.max_nodes, **options)


@st.composite
def some_trunks(draw, batch: int, *, tokens: int = TOKENS) -> Trunks:
    """Trunks that end anywhere; all chances are of eighths, and those of a place at most 1."""
    gamma, choices = draw(st.integers(1, 4)), draw(st.integers(1, min(3, tokens)))
    token_ids = torch.full((batch, gamma, choices), -1)
    chances = torch.zeros(batch, gamma, choices, dtype=torch.float64)
    for b in range(batch):
        for place in range(draw(st.integers(0, gamma))):
            some = draw(st.permutations(range(tokens)))[:choices]
            cuts = draw(st.lists(st.integers(0, 8), min_size=choices, max_size=choices))
            token_ids[b, place] = torch.tensor(some)
            chances[b, place] = torch.tensor([0, *sorted(cuts)]).diff().flip(0) / 8
    return Trunks(token_ids, chances)


def some_owner(matrix: AdjacencyMatrix) -> st.SearchStrategy[Owner | None]:
    """Whose a request is; with a salt, so that nothing is shared, one time of three."""
    owners = [None] if matrix.scope == "isolated" else [None, Owner("a"), Owner("a", "salt")]
    return st.sampled_from(owners)


@st.composite
def settings_of_growth(draw, *, contexts=(1, 2)) -> Setting:
    """Rates are eighths, often equal: products of eight are exact in float32."""
    batch = draw(st.integers(1, 3))
    slots = draw(st.sampled_from([2, 64]))
    matrix = make_matrix(
        draw(st.sampled_from(SCOPES)), vocab_size=TOKENS, slots=slots, contexts=contexts
    )
    for b in range(3):
        matrix.begin(b, draw(st.integers(0, NUM_COUNTED - 1)), draw(some_owner(matrix)))
    token = st.integers(0, TOKENS - 1)
    some = st.lists(token, max_size=K, unique=True)
    context = st.lists(token, min_size=2, max_size=matrix.layout.reach)
    written = st.tuples(st.integers(0, 2), context, some, st.integers(1, 4))
    for b, context, successors, times in draw(st.lists(written, max_size=10)):
        salt = int(matrix.salts[b])
        successors = [*successors, *[-1] * K][:K]
        for _ in range(times):
            write_entries(matrix, context, salt, successors, own=True, shared=True)
    shape = (NUM_CLASSES, len(contexts), 2, K, 4)
    count = math.prod(shape)
    eighths = draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))
    text = st.lists(token, min_size=1, max_size=3)
    return Setting(
        matrix=matrix,
        rates=torch.tensor(eighths).view(shape) / 8,
        texts=draw(st.lists(text, min_size=batch, max_size=batch)),
        max_depths=draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch)),
        max_nodes=draw(st.integers(1, 12)),
        beam=draw(st.integers(1, 5)),
        levels=draw(st.integers(1, 5)),
    )
