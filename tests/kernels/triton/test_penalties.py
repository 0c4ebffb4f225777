"""Penalties at a row of a tree are those of a text that ends with its path."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.strategies import batch_trees, paths_of
from tests.core.strategies import trees as templates_of
from tests.kernels.triton.grown_trees import on_device
from vllm_recycle.kernels.triton.penalties import Penalties, penalise_paths

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 40
VOCABULARY = torch.arange(VOCAB)
# One of the requests has none.
REPETITION, FREQUENCY, PRESENCE = [1.0, 1.3, 1.0, 0.7], [0.0, 0.2, -0.5, 0.0], [0.0, 0.0, 0.4, 0.3]


def step_of(templates, seed: int, vocab: int) -> tuple[list, list[torch.Tensor], torch.Tensor]:
    """Random tokens in trees of some of four requests.

    Of each row the request and the tokens of its path; what the kernels are told of the rows; and
    the parents.
    """
    torch.manual_seed(seed)
    whose = torch.randperm(4)[: len(templates)].tolist()
    rows, given = [], []
    for state, tree in zip(whose, templates, strict=True):
        token_ids = torch.randint(-1, vocab, (tree.num_nodes + 1,))
        rows += [(state, token_ids[path[1:]]) for path in paths_of(tree)]
        given += [(int(token), node, state) for node, token in enumerate(token_ids)]
    columns = [torch.tensor(column, device=DEVICE) for column in zip(*given, strict=True)]
    columns[1] = columns[1].int()
    return rows, columns, on_device(batch_trees(templates), whose, 4).parents


TREES = st.lists(templates_of(max_nodes=20), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(templates=TREES, seed=st.integers(0, 99))
def test_they_are_those_of_the_chain_that_leads_to_the_row(templates, seed):
    rows, given, parents = step_of(templates, seed, VOCAB)
    penalties = Penalties(
        *(torch.tensor(values, device=DEVICE) for values in (REPETITION, FREQUENCY, PRESENCE)),
        torch.randint(-(1 << 31), 1 << 31, (4, 2), dtype=torch.int32, device=DEVICE),
        torch.randint(0, 2, (4, VOCAB), dtype=torch.int32, device=DEVICE),
    )
    logits = torch.randn(len(rows), VOCAB)
    got = logits.clone().to(DEVICE)
    penalise_paths(got, *given, parents=parents, penalties=penalties)
    for row, (state, tokens) in enumerate(rows):
        counts = penalties.output_counts[state].cpu() + (tokens[:, None] == VOCABULARY).sum(0)
        words = penalties.prompt_bits[state].cpu()
        in_prompt = (words[VOCABULARY // 32] >> (VOCABULARY % 32) & 1).bool()
        expected, seen = logits[row].clone(), in_prompt | (counts > 0)
        factor = torch.where(seen, torch.tensor(REPETITION[state]), 1.0)
        expected *= torch.where(expected > 0, 1.0 / factor, factor)
        expected -= torch.tensor(FREQUENCY[state]) * counts
        expected -= torch.tensor(PRESENCE[state]) * (counts > 0)
        torch.testing.assert_close(got[row].cpu(), expected)
