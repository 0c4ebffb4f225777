"""Copies in C++ are those of the reference, bit for bit, and edits take fewer calls with them."""

from __future__ import annotations

import json

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.core.recycling_steps import make_matrix
from tests.integration.engines import EXAMPLES
from vllm_recycle.core import reference
from vllm_recycle.core.adjacency import NUM_CLASSES, Ends
from vllm_recycle.core.choose import Price
from vllm_recycle.core.copies import MIN_MATCH, MIN_MATCH_CPU, Copies
from vllm_recycle.core.curve import TREES
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.token_recycling import TokenRecyclingProposer, TokenRecyclingState
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.kernels.cpu import calls

BATCH, NODES, CONTEXTS = 3, 16, (1, 2, 4, 16)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kinds=st.sampled_from([1, 2, 4, 30]),
    has_holes=st.booleans(),
    has_hints=st.booleans(),
    counts=st.booleans(),
    min_match=st.sampled_from([MIN_MATCH, MIN_MATCH_CPU]),
)
def test_copies_equal_the_reference(seed, kinds, has_holes, has_hints, counts, min_match):
    torch.manual_seed(seed)
    width, classes = 300, torch.randint(NUM_CLASSES, (BATCH + 2,))
    token_ids = torch.randint(kinds, (BATCH, width), dtype=torch.int32)
    token_ids[:, 100:200] = token_ids[:, :100]  # longer matches than chance gives
    is_token = torch.rand(BATCH, width) < 0.97 if has_holes else None
    idx_mapping = torch.randperm(BATCH + 2)[:BATCH]
    states = [Copies(classes, 20, min_match=min_match, counts=counts) for _ in range(2)]
    for state in states:
        state.acceptance.counts[:, :, 5] = 1999.0  # soon halved
        for index in idx_mapping.tolist():
            state.begin(index, token_ids[0, 30:90].tolist() if has_hints and index % 2 else ())
    last_positions = torch.randint(-1, 190, (BATCH,)).tolist()
    for _ in range(12):
        ends = Ends(token_ids, last_positions, is_token)
        trunks = [
            operations.draft_copies(state, idx_mapping, ends)
            for operations, state in zip((reference, calls), states, strict=True)
        ]
        assert trunks[0].token_ids.equal(trunks[1].token_ids)
        assert trunks[0].chances.equal(trunks[1].chances)
        gets_none = torch.tensor(last_positions) < 0  # not from its hint either
        assert (trunks[0].token_ids[gets_none] == -1).all()
        assert (states[0].places[idx_mapping[gets_none]] == -1).all()
        follows = torch.full((BATCH, 7), -1)
        for b, last in enumerate(last_positions):
            size = int(torch.randint(1, 8, ())) if 0 <= last < width - 8 else 0
            follows[b, :size] = token_ids[b, last + 1 : last + 1 + size]
            last_positions[b] += size
        reference.learn_copies(states[0], idx_mapping, ends, follows)
        calls.learn_copies(states[1], idx_mapping, ends, follows)
        for name in ("stands", "places"):
            assert getattr(states[0], name).equal(getattr(states[1], name))
        assert states[0].acceptance.counts.equal(states[1].acceptance.counts)


def tokens_per_call(texts: list[tuple[list[int], list[int]]], *, has_copies: bool) -> float:
    """Of prompts and answers that are known, with trees of 16 nodes; only right tokens teach."""
    matrix = make_matrix(
        "sequence", vocab_size=1 << 16, k=8, contexts=CONTEXTS, slots=1 << 18, max_num_reqs=1
    )
    proposer = TokenRecyclingProposer(
        TokenRecyclingState(matrix), max_nodes=NODES, operations=calls
    )
    copies = Copies(matrix.classes, NODES, min_match=MIN_MATCH_CPU)
    request = torch.zeros(1, dtype=torch.int64)
    price, num_calls = {TREES: Price(torch.ones(NODES + 2, dtype=torch.float64))}, 0
    for prompt, answer in texts:
        proposer.add_request(NewRequest(0, prompt))
        copies.begin(0)
        tokens, length = torch.tensor([[*prompt, *answer]], dtype=torch.int32), len(prompt) + 1
        while length < tokens.shape[1]:
            ends, follows = Ends(tokens, [length - 1]), tokens[0, length:].tolist()
            trunks = calls.draft_copies(copies, request, ends) if has_copies else None
            drafts = proposer.propose(TextEnds(request, ends, [NODES], trunks), prices=price)
            [nodes], [parents] = drafts.token_ids, drafts.parents
            path = [0]
            for row, (token, parent) in enumerate(zip(nodes, parents, strict=True), 1):
                is_right = len(path) <= len(follows) and token == follows[len(path) - 1]
                path += [row] if is_right and parent == path[-1] else []
            new_tokens = follows[: len(path)]
            path = path[: len(new_tokens)]
            successors = torch.full((1 + len(nodes), 8), -1, dtype=torch.int32)
            successors[path, 0] = torch.tensor(new_tokens, dtype=torch.int32)
            row_token_ids = torch.full((1 + len(nodes),), -1)  # other rows write no entries
            row_token_ids[path] = tokens[0, length - 1 : length - 1 + len(path)].long()
            step = VerifiedStep(
                request,
                torch.tensor([[0, *parents]]),
                row_token_ids,
                torch.tensor([0, 1 + len(nodes)]),
                successors,
                WalkResult(
                    torch.tensor([path]), torch.tensor([new_tokens]), torch.tensor([len(path)])
                ),
            )
            calls.learn_copies(copies, request, ends, step.walked.token_ids)
            proposer.learn(ends, step)
            length += len(new_tokens)
            num_calls += 1
    return sum(len(answer) for _, answer in texts) / num_calls


def test_edits_of_files_take_fewer_calls():
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "models" / "target")
    lines = (EXAMPLES / "prompts" / "commits.jsonl").read_text("utf-8").splitlines()
    texts = [
        tuple(tokenizer(row[key]).input_ids for key in ("prompt", "answer"))
        for row in map(json.loads, lines)
    ]
    gain = tokens_per_call(texts, has_copies=True) / tokens_per_call(texts, has_copies=False)
    assert gain > 1.05, gain
