"""Penalties and bad words at a row of a tree are those of a text that ends with its path."""

from __future__ import annotations

from itertools import accumulate

import torch
from grown_trees import on_device
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import batch_trees
from strategies import trees as templates_of

from vllm_recycle.kernels.triton.penalties import BadWords, Penalties, ban_words, penalise_paths

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 40
VOCABULARY = torch.arange(VOCAB)
# One of the requests has none.
REPETITION, FREQUENCY, PRESENCE = [1.0, 1.3, 1.0, 0.7], [0.0, 0.2, -0.5, 0.0], [0.0, 0.0, 0.4, 0.3]


def rows_of(templates, whose: list[int], vocab: int) -> tuple[list, torch.Tensor, tuple]:
    """Request and node of each row, random tokens, and what the kernels are told of them."""
    rows = [(b, node) for b, tree in enumerate(templates) for node in range(tree.num_nodes + 1)]
    token_ids = torch.randint(-1, vocab, (len(rows),))
    local_pos = torch.tensor([node for _, node in rows], dtype=torch.int32)
    owners = torch.tensor([whose[b] for b, _ in rows])
    return rows, token_ids, tuple(one.to(DEVICE) for one in (token_ids, local_pos, owners))


TREES = st.lists(templates_of(max_nodes=20), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(templates=TREES, seed=st.integers(0, 99))
def test_they_are_those_of_the_chain_that_leads_to_the_row(templates, seed):
    torch.manual_seed(seed)
    batch = len(templates)
    whose = torch.randperm(4)[:batch].tolist()
    trees = batch_trees(templates)
    penalties = Penalties(
        *(torch.tensor(values, device=DEVICE) for values in (REPETITION, FREQUENCY, PRESENCE)),
        torch.randint(-(1 << 31), 1 << 31, (4, 2), dtype=torch.int32, device=DEVICE),
        torch.randint(0, 2, (4, VOCAB), dtype=torch.int32, device=DEVICE),
    )
    rows, token_ids, given = rows_of(templates, whose, VOCAB)
    logits = torch.randn(len(rows), VOCAB)
    got = logits.clone().to(DEVICE)
    parents = on_device(trees, whose, 4, DEVICE).parents
    penalise_paths(got, *given, parents=parents, penalties=penalties)
    for row, (b, node) in enumerate(rows):
        path = trees.ancestor_mask[b, node, : templates[b].num_nodes + 1].nonzero().flatten()
        tokens = token_ids[row - node + path[1:]]
        counts = penalties.output_counts[whose[b]].cpu() + (tokens[:, None] == VOCABULARY).sum(0)
        words = penalties.prompt_bits[whose[b]].cpu()
        in_prompt = (words[VOCABULARY // 32] >> (VOCABULARY % 32) & 1).bool()
        expected, seen = logits[row].clone(), in_prompt | (counts > 0)
        factor = torch.where(seen, torch.tensor(REPETITION[whose[b]]), 1.0)
        expected *= torch.where(expected > 0, 1.0 / factor, factor)
        expected -= torch.tensor(FREQUENCY[whose[b]]) * counts
        expected -= torch.tensor(PRESENCE[whose[b]]) * (counts > 0)
        torch.testing.assert_close(got[row].cpu(), expected)


@settings(max_examples=40, deadline=None)
@given(templates=TREES, seed=st.integers(0, 99))
def test_a_word_that_a_path_begins_is_not_ended(templates, seed):
    torch.manual_seed(seed)
    batch = len(templates)
    whose, trees = torch.randperm(4)[:batch].tolist(), batch_trees(templates)
    vocab, most = 3, 9  # so few tokens that words come up
    prompts, outputs = torch.randint(1, 6, (4,)), torch.randint(1, 4, (4,))
    texts = torch.randint(vocab, (4, 12))
    words = [
        [torch.randint(vocab, (length,)).tolist() for length in torch.randint(1, 5, (count,))]
        for count in (0, 3, most, 1)
    ]
    offsets = torch.tensor(
        [[0, *accumulate(map(len, some)), *[0] * most][: most + 1] for some in words]
    )
    flat = [[token for word in some for token in word] for some in words]
    token_ids = torch.tensor([[*some, *[-7] * 40][:40] for some in flat])
    counts = torch.tensor([len(some) for some in words])
    given = (token_ids, offsets, counts, texts, prompts, prompts + outputs)
    rows, tokens, of_rows = rows_of(templates, whose, vocab)
    got = torch.zeros(len(rows), vocab, device=DEVICE)
    ban_words(
        got,
        *of_rows,
        parents=on_device(trees, whose, 4, DEVICE).parents,
        words=BadWords(*(one.to(DEVICE, torch.int32) for one in given)),
        most_words=most,
    )
    for row, (b, node) in enumerate(rows):
        path = trees.ancestor_mask[b, node, : templates[b].num_nodes + 1].nonzero().flatten()
        end = int(prompts[whose[b]] + outputs[whose[b]])
        output = texts[whose[b], int(prompts[whose[b]]) : end].tolist()
        output += tokens[row - node + path[1:]].tolist()
        banned = {
            last
            for *others, last in words[whose[b]]
            if others == output[len(output) - len(others) :]
        }
        assert got[row].isneginf().nonzero().flatten().tolist() == sorted(banned)
