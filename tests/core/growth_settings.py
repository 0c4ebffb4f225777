"""What trees are grown from, for the tests of the core and of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from recycling_steps import K, ends_of, make_matrix, write_entries

from vllm_recycle.core.adjacency import SCOPES, AdjacencyMatrix
from vllm_recycle.core.grow import Growth, TextEnds, grow

TOKENS = 4


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

    @property
    def arguments(self) -> tuple:
        texts = TextEnds(torch.arange(len(self.texts)), ends_of(self.texts), self.max_depths)
        return self.matrix, self.rates, texts

    def grow(self, **options) -> Growth:
        options = {"beam": self.beam, "levels": self.levels, **options}
        return grow(*self.arguments, max_nodes=self.max_nodes, **options)


@st.composite
def settings_of_growth(draw, *, contexts=(1, 2)) -> Setting:
    """Rates are eighths, often equal: products of eight are exact in float32."""
    batch = draw(st.integers(1, 3))
    slots = draw(st.sampled_from([2, 64]))
    matrix = make_matrix(
        draw(st.sampled_from(SCOPES)), vocab_size=TOKENS, slots=slots, contexts=contexts
    )
    for b in range(3):
        matrix.begin(b)
    token = st.integers(0, TOKENS - 1)
    some = st.lists(token, max_size=K, unique=True)
    context = st.lists(token, min_size=2, max_size=matrix.layout.reach)
    written = st.tuples(st.integers(1, 3), context, some, st.integers(1, 4))
    for salt, context, successors, times in draw(st.lists(written, max_size=10)):
        successors = [*successors, *[-1] * K][:K]
        for _ in range(times):
            write_entries(matrix, context, salt, successors, own=True, shared=True)
    shape = (len(contexts), 2, K, 4)
    count = len(contexts) * 2 * K * 4
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
