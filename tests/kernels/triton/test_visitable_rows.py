"""The rows that are chosen to be sampled: those of a plain loop, and all that a walk visits."""

from __future__ import annotations

from itertools import accumulate, permutations

import pytest
import torch
from grown_trees import batch_of, on_device
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import drafts, trees

from vllm_recycle.core import REFERENCE, TreeTemplate
from vllm_recycle.kernels.triton import visitable_rows
from vllm_recycle.kernels.triton.top_k import top_k
from vllm_recycle.kernels.triton.visitable_rows import choose_rows, tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, K, MAX_NUM_REQS, MAX_NODES = 9, 3, 4, 12


def _noised_argmax(logits, keys, mask, seed, pos, temp, is_drafting, use_fp64):
    """In the place of vLLM's: `noised` of this file, of all at once."""
    if temp != 0.0:
        noise = ((seed * 13 + pos * 29 + keys * 17) % 31 * 16 + keys).to(tl.float32) / 64
        logits = tl.where(mask, logits / temp + noise, float("-inf"))
    return tl.max(logits, axis=0, return_indices=True)


# Compiled or interpreted, as the kernels are.
noised_argmax = type(visitable_rows._choose_rows_kernel)(_noised_argmax)


def noised(logits: list[float], seed: int, position: int, temperature: float) -> list[float]:
    """Integer logits with noise, no two of which are equal."""
    if not temperature:
        return logits
    return [
        logit / temperature + ((seed * 13 + position * 29 + token * 17) % 31 * 16 + token) / 64
        for token, logit in enumerate(logits)
    ]


def visitable_by_hand(request: dict) -> list[int]:
    """The rows of a request's tree whose path agrees with what may be sampled on it."""
    found = [0]
    for row, (parent, _) in enumerate(request["tree"].nodes[: request["num_rows"] - 1], start=1):
        draft, logits = request["draft"][row - 1], request["logits"][parent]
        if parent not in found or draft < 0:
            continue
        values = noised(logits, request["seed"], request["first"] + parent, request["temperature"])
        best = sorted(range(VOCAB), key=lambda token: -logits[token])[:K]
        rivals = [token for token in best if logits[token] > logits[draft]]
        if all(values[draft] > values[token] for token in rivals):
            found.append(row)
    return found


def sampled_by_hand(request: dict, kept: int) -> list[int]:
    """The token of each row, of those that are left when the improbable ones are cut off."""
    tokens = []
    for row, logits in enumerate(request["logits"]):
        values = noised(logits, request["seed"], request["first"] + row, request["temperature"])
        left = sorted(range(VOCAB), key=lambda token: -logits[token])[:kept]
        tokens.append(max(left, key=lambda token: values[token]))
    return tokens


@st.composite
def requests(draw) -> dict:
    """A tree, its drafts, and the logits of a prefix of its rows."""
    tree = draw(trees(max_nodes=MAX_NODES))
    num_rows = draw(st.integers(1, tree.num_nodes + 1) | st.just(tree.num_nodes + 1))
    in_order = st.permutations([float(value) for value in range(VOCAB)])
    return {
        "tree": tree,
        "draft": draw(drafts(tree, vocab_size=VOCAB)),
        "num_rows": num_rows,
        "logits": draw(st.lists(in_order, min_size=num_rows, max_size=num_rows)),
        "seed": draw(st.integers(0, 100)),
        "first": draw(st.integers(0, 100)),
        "temperature": draw(st.sampled_from([0.0, 0.5, 1.0])),
    }


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(requests(), min_size=1, max_size=3),
    most=st.integers(1, MAX_NODES + 2),
    kept=st.integers(1, VOCAB),
)
def test_rows_are_those_of_a_plain_loop_and_a_walk_goes_as_far_as_they_do(batch, most, kept):
    templates = batch_of([request["tree"] for request in batch], MAX_NODES)
    indices = list(range(len(batch), 0, -1))
    of_all = torch.full((MAX_NUM_REQS, MAX_NODES), -1, device=DEVICE)
    by_request = {"temperature": torch.zeros(MAX_NUM_REQS, device=DEVICE)}
    by_request["seed"] = torch.zeros(MAX_NUM_REQS, dtype=torch.int64, device=DEVICE)
    for index, request in zip(indices, batch, strict=True):
        draft = torch.tensor(request["draft"], device=DEVICE)
        of_all[index, : len(draft)] = draft
        for name, values in by_request.items():
            values[index] = request[name]
    starts = [0, *accumulate(request["num_rows"] for request in batch)]
    cu_num_logits = torch.tensor(starts, device=DEVICE)
    positions = [r["first"] + row for r in batch for row in range(r["num_rows"])]
    logits = torch.tensor([row for request in batch for row in request["logits"]], device=DEVICE)
    # As where a vocabulary is padded.
    logits = torch.nn.functional.pad(logits, (0, 2), value=torch.inf)[:, :VOCAB]
    rows, left = choose_rows(
        logits,
        top_k(logits, K),
        of_all,
        trees=on_device(templates, indices, MAX_NUM_REQS, DEVICE),
        idx_mapping=torch.tensor(indices, device=DEVICE),
        cu_num_logits=cu_num_logits,
        # A token that is no row comes first.
        positions=torch.tensor([-1, *positions], device=DEVICE),
        logits_indices=torch.arange(1, len(logits) + 1, device=DEVICE),
        temperatures=by_request["temperature"],
        seeds=by_request["seed"],
        noised_argmax=noised_argmax,
        use_fp64=False,
        most=most,
    )
    sampled = torch.tensor([t for r in batch for t in sampled_by_hand(r, kept)], device=DEVICE)
    drafted = of_all[indices]
    whole, part = (
        REFERENCE.walk(sampled, tokens, cu_num_logits, tree=templates) for tokens in (drafted, left)
    )
    for index, request in enumerate(batch):
        by_hand = visitable_by_hand(request)
        chosen = by_hand[:most] + [0] * (most - len(by_hand))
        assert (rows[index] - starts[index]).tolist() == chosen
        for row, token in enumerate(left[index].tolist(), start=1):
            assert token == (int(drafted[index, row - 1]) if row in chosen else -1)
        path = [row for row in whole.path[index].tolist() if row >= 0]
        assert set(path) <= set(by_hand)
        reached = [row for row in part.path[index].tolist() if row >= 0]
        assert reached == [row for row in path if row in chosen]


def choose_on_a_chain(
    tokens: list[int], logits: torch.Tensor, *, most: int, temperature: float = 0.0
) -> tuple[list[int], list[int]]:
    """Rows and drafts that are chosen for one request, whose tree is a chain of these tokens.

    Args:
        tokens: of the drafts.
        logits: [1 + drafts, VOCAB].
        most: rows that are chosen.
        temperature: of the request, whose seed and position are 0.

    """
    num_nodes, num_rows = len(tokens), len(logits)
    chain = TreeTemplate(tuple((row, 0) for row in range(num_nodes)))
    zeros = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    rows, left = choose_rows(
        logits,
        top_k(logits, K),
        torch.tensor([tokens], device=DEVICE),
        trees=on_device(batch_of([chain], num_nodes), [0], 1, DEVICE),
        idx_mapping=zeros,
        cu_num_logits=torch.tensor([0, num_rows], device=DEVICE),
        positions=torch.arange(num_rows, device=DEVICE),
        logits_indices=torch.arange(num_rows, device=DEVICE),
        temperatures=torch.full((1,), temperature, device=DEVICE),
        seeds=zeros,
        noised_argmax=noised_argmax,
        use_fp64=False,
        most=most,
    )
    return rows[0].tolist(), left[0].tolist()


@pytest.mark.parametrize("most", [1, 2, 4, 5, 6])
def test_of_more_rows_than_are_sampled_the_first_are_chosen(most):
    tokens = [3, 1, 4, 2]
    # Of each row the token that is drafted below it is the most probable one.
    logits = torch.zeros(5, VOCAB, device=DEVICE)
    for row, token in enumerate(tokens):
        logits[row, token] = 1.0
    rows, left = choose_on_a_chain(tokens, logits, most=most)
    kept = min(most, 5)
    assert rows == [*range(kept), *[0] * (most - kept)]
    assert left == [*tokens[: kept - 1], *[-1] * (5 - kept)]


@pytest.mark.parametrize("rank", range(K))
def test_each_of_the_most_probable_tokens_can_come_before_a_draft(rank):
    """Where one of them alone does, with its noise, and where none does."""

    def logits_of(best_first: tuple[int, ...]) -> list[float]:
        known = {token: -float(place) for place, token in enumerate(best_first)}
        return [known.get(token, -float(VOCAB)) for token in range(VOCAB)]

    def before_the_draft(best_first: tuple[int, ...]) -> list[int]:
        values = noised(logits_of(best_first), 0, 0, 1.0)
        *rivals, draft = (values[token] for token in best_first)
        return [place for place, value in enumerate(rivals) if value > draft]

    orders = list(permutations(range(VOCAB), K + 1))
    for expected in ([rank], []):
        best_first = next(order for order in orders if before_the_draft(order) == expected)
        logits = torch.tensor([logits_of(best_first)] * 2, device=DEVICE)
        found = choose_on_a_chain([best_first[K]], logits, most=2, temperature=1.0)
        assert found == (([0, 0], [-1]) if expected else ([0, 1], [best_first[K]]))
