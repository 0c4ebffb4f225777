"""Token Recycling from end to end with a toy target, and the file of what was learnt."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.core.growth_settings import settings_of_growth
from tests.core.recycling_steps import (
    VOCAB,
    K,
    as_tensors,
    ends_of,
    make_matrix,
    verify,
    write_entries,
)
from tests.core.strategies import BRIEF, THOROUGH, seconds_by_rows
from tests.core.strategies import trees as templates
from vllm_recycle.core import reference
from vllm_recycle.core.adjacency import MAX_STEADINESS, SCOPES
from vllm_recycle.core.choose import Price, choose
from vllm_recycle.core.curve import CHAINS, TREES, Load, MeasuredCurve
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.token_recycling import TokenRecyclingProposer, TokenRecyclingState
from vllm_recycle.core.tree import Trees, TreeTemplate

FINGERPRINT = "model-a"


def fibonacci(text: list[int]) -> list[int]:
    """The most probable tokens after a text: its last two, added up, and then others."""
    first = sum(text[-2:]) % VOCAB
    return [(first + 3 * rank) % VOCAB for rank in range(VOCAB)]


def greedy(text: list[int], length: int) -> list[int]:
    """What the target itself makes of a text."""
    text = list(text)
    while len(text) < length:
        text.append(fibonacci(text)[0])
    return text


def linear(row_cost: float) -> Price:
    return Price(MeasuredCurve.linear(row_cost, 40, [TREES]).by_rows(TREES, Load(1)))


def make_proposer(*, max_nodes=8, row_cost=0.05, operations=reference, tree=None, **options):
    proposer = TokenRecyclingProposer(
        TokenRecyclingState(make_matrix(**options)),
        max_nodes=max_nodes,
        tree=tree,
        operations=operations,
    )
    proposer.prices = {TREES: linear(row_cost)}
    return proposer


def propose(proposer, idx_mapping, texts, max_depths=50) -> tuple[torch.Tensor, Trees]:
    max_depths = torch.tensor(max_depths).expand(len(texts)).tolist()
    ends = TextEnds(idx_mapping, ends_of(texts), max_depths)
    drafts = proposer.propose(ends, prices=proposer.prices)
    drafts, parents = as_tensors(drafts, proposer.num_nodes)
    return drafts, Trees.from_parents(torch.nn.functional.pad(parents, (1, 0)))


def step(proposer, idx_mapping, texts) -> int:
    """Draft and verify; returns how many tokens were emitted."""
    drafts, trees = propose(proposer, idx_mapping, texts)
    counts = (drafts >= 0).sum(1).tolist()
    walked = verify(proposer, idx_mapping, texts, fibonacci, trees, drafts, counts)
    return int(walked.lengths.sum())


def steps_of(proposer, req_state_idx: int, prompt: list[int], length: int) -> int:
    """How many steps a text takes."""
    proposer.add_request(NewRequest(req_state_idx, prompt))
    texts, steps = [list(prompt)], 0
    while len(texts[0]) < length:
        step(proposer, torch.tensor([req_state_idx]), texts)
        steps += 1
    assert texts[0][:length] == greedy(prompt, length)
    return steps


# From end to end.


CHAIN = TreeTemplate(tuple((row, 0) for row in range(8)))


@pytest.mark.parametrize("tree", [None, CHAIN])
@pytest.mark.parametrize("scope", SCOPES)
def test_accepted_tokens_rise(scope, tree):
    proposer = make_proposer(scope=scope, slots=1024, tree=tree)
    texts, idx_mapping = [[1, 1], [0, 3]], torch.tensor([2, 0])
    for req_state_idx, text in zip(idx_mapping.tolist(), texts, strict=True):
        proposer.add_request(NewRequest(req_state_idx, text))
    emitted = [step(proposer, idx_mapping, texts) for _ in range(40)]
    assert texts == [greedy([1, 1], len(texts[0])), greedy([0, 3], len(texts[1]))]
    assert emitted[0] == 2  # nothing is known, each has one token
    # Once round, the text is known: all that is drafted is right, but for a node now and then.
    assert sum(emitted[-10:]) > 10 * (2 + proposer.num_nodes)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("whose", [0, 1, None])
def test_a_text_is_taken_in_for_one_request_or_for_all(scope, whose):
    proposer, text = make_proposer(scope=scope, slots=1024), greedy([1, 1], 30)
    matrix = proposer.state.matrix
    for req_state_idx in (0, 1):
        proposer.add_request(NewRequest(req_state_idx, [0]))
    if whose is None and scope == "isolated":
        with pytest.raises(ValueError, match="scope is 'isolated', expected one with shared"):
            proposer.take_in(torch.tensor(text))
        assert matrix.num_written == 0
        return
    proposer.take_in(text, whose)
    is_shared = whose is None or scope == "shared"
    assert ((matrix.shared_entries()[:, 0] >= 0).sum() == matrix.num_written) == is_shared
    drafts, _ = propose(proposer, torch.tensor([0, 1]), [text[:9], text[:9]])
    knows = [draft[0] == text[9] for draft in drafts.tolist()]
    assert knows == [is_shared or whose == req_state_idx for req_state_idx in (0, 1)]


def test_a_longer_context_and_what_others_left_and_a_prompt_make_it_fewer_steps():
    def steps(length=30, *, before=0, prompt=(1, 1), seeds=True, **options) -> int:
        proposer = make_proposer(**options)
        proposer.seeds_from_prompts = seeds
        return [steps_of(proposer, 0, [*prompt], length) for _ in range(1 + before)][-1]

    assert steps(80) < 0.7 * steps(80, contexts=(1,))
    prompt = greedy([1, 1], 18)
    assert steps(36, prompt=prompt) < 0.7 * steps(36, prompt=prompt, seeds=False)
    for scope in SCOPES:
        starts_warm = steps(scope=scope, before=1) < 0.7 * steps(scope=scope)
        assert starts_warm == (scope != "isolated")


@pytest.mark.parametrize("scope", SCOPES)
@BRIEF
@given(data=st.data(), seed=st.integers(0, 10**6), batch=st.integers(1, 3))
def test_the_text_is_the_targets_own_whatever_is_drafted_and_scheduled(scope, data, seed, batch):
    tree = data.draw(st.none() | templates(max_nodes=9, k=K))
    nodes = data.draw(st.integers(1, 9)) if tree is None else tree.num_nodes
    row_cost = data.draw(st.sampled_from([0.0, 0.05, 0.3]))
    proposer = make_proposer(scope=scope, max_nodes=nodes, row_cost=row_cost, tree=tree, slots=16)
    chance = random.Random(seed)
    texts = [[chance.randrange(VOCAB) for _ in range(chance.randint(2, 20))] for _ in range(batch)]
    prompts = [list(text) for text in texts]
    idx_mapping = torch.tensor(chance.sample(range(3), batch))
    for req_state_idx, text in zip(idx_mapping.tolist(), texts, strict=True):
        proposer.add_request(NewRequest(req_state_idx, text))
    for _ in range(6):
        max_depths = [chance.choice([0, 1, 2, 50]) for _ in texts]
        drafts, trees = propose(proposer, idx_mapping, texts, max_depths)
        # Up to the last node that is filled.
        counts = torch.arange(1, nodes + 1).where(drafts >= 0, 0).max(1).values.tolist()
        assert bool((trees.depths <= nodes).all())
        if chance.random() < 0.3:  # drafts of another kind: often right, at times one text twice
            parents = [[0, *(chance.randint(0, row) for row in range(nodes))] for _ in texts]
            trees = Trees.from_parents(torch.tensor(parents))
            drafts = torch.tensor([[chance.randrange(VOCAB) for _ in range(nodes)] for _ in texts])
            counts = [nodes] * batch
        counts = [chance.randint(0, count) for count in counts]
        lengths = [len(text) for text in texts]
        walked = verify(proposer, idx_mapping, texts, fibonacci, trees, drafts, counts)
        emitted = [len(text) - length for text, length in zip(texts, lengths, strict=True)]
        assert walked.lengths.tolist() == emitted
        assert all(1 <= length <= 1 + count for length, count in zip(emitted, counts, strict=True))
    assert texts == [greedy(p, len(text)) for p, text in zip(prompts, texts, strict=True)]


@THOROUGH
@given(setting=settings_of_growth(contexts=(1, 2)), seconds=seconds_by_rows())
def test_what_is_not_grown_would_not_be_chosen(setting, seconds):
    state = TokenRecyclingState(setting.matrix)
    proposer = TokenRecyclingProposer(state, max_nodes=setting.max_nodes)
    state.acceptance.counts[..., 0] = state.acceptance.counts[..., 1] = 0.0
    state.acceptance.counts[..., :4, 0] = 8 * setting.rates
    state.acceptance.counts[..., :4, 1] = 4
    setting = replace(setting, rates=state.acceptance.rates(), beam=None, levels=None)
    price, growth = Price(seconds), setting.grow()
    texts = setting.arguments[-1]
    drafts = proposer.propose(texts, prices={TREES: price})
    drafts, parents = as_tensors(drafts, setting.max_nodes)
    counts = torch.tensor(choose(growth.worths.tolist(), seconds.tolist())[0])
    is_chosen = torch.arange(setting.max_nodes) < counts[:, None]
    assert drafts.equal(growth.token_ids.where(is_chosen, -1))
    assert parents[is_chosen].equal(growth.parents[:, 1:][is_chosen])


def knowing_proposer(**options) -> TokenRecyclingProposer:
    """One that knows what follows each token: the next ones."""
    proposer = make_proposer(contexts=(1,), **options)
    for token in range(VOCAB):
        successors = [(token + 1 + rank) % VOCAB for rank in range(K)]
        write_entries(proposer.state.matrix, [token], 1, successors, own=False, shared=True)
    return proposer


def test_where_rows_cost_nothing_a_whole_template_is_drafted_and_else_what_pays():
    tree = TreeTemplate(((0, 0), (1, 0), (0, 1), (1, 1), (2, 0)))
    sizes = []
    for row_cost in (0.0, 0.05, 5.0):
        proposer = knowing_proposer(tree=tree, row_cost=row_cost)
        drafts = propose(proposer, torch.tensor([1]), [[3]])[0][0].tolist()
        filled = [4, 5, 5, 6, 6]
        sizes.append(sum(token >= 0 for token in drafts))
        assert drafts == filled[: sizes[-1]] + [-1] * (5 - sizes[-1])
    assert sizes[0] == 5 > sizes[1] > sizes[2] == 0


def test_chains_are_drafted_where_they_promise_more_for_their_time():
    proposer = knowing_proposer()
    idx_mapping, texts = torch.tensor([0, 1]), [[3], [5]]
    dear, cheap = (linear(cost) for cost in (0.06, 0.04))
    as_dear, _ = propose(proposer, idx_mapping, texts)
    for prices in ({TREES: cheap, CHAINS: dear}, {TREES: dear, CHAINS: dear}):
        proposer.prices = prices
        _, trees = propose(proposer, idx_mapping, texts)
        assert (trees.parents[:, 1:3] == 0).any()
    proposer.prices = {TREES: dear, CHAINS: linear(0.001)}
    drafts, trees = propose(proposer, idx_mapping, texts)
    counts = (drafts >= 0).sum(1)
    for text, draft, parents, count in zip(texts, drafts, trees.parents, counts, strict=True):
        assert parents[1 : 1 + count].tolist() == list(range(count))
        assert draft[:count].tolist() == [(text[0] + 1 + i) % VOCAB for i in range(count)]
    assert int(counts.sum()) > int((as_dear >= 0).sum())


# The file.


def make_state(**options) -> TokenRecyclingState:
    return TokenRecyclingState(make_matrix(**options))


def learn_something(**options) -> TokenRecyclingState:
    proposer = make_proposer(**options)
    steps_of(proposer, 0, [1, 1], 30)
    return proposer.state


@pytest.fixture
def learnt() -> TokenRecyclingState:
    return learn_something()


@pytest.mark.parametrize("scope", SCOPES)
def test_a_saved_state_is_loaded_without_what_requests_wrote_for_themselves(tmp_path, scope):
    path, learnt, loaded = tmp_path / "matrix", learn_something(scope=scope), make_state()
    learnt.save(path, learnt.form(FINGERPRINT))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    write_entries(loaded.matrix, [4, 5], 1, [1] * K, own=True, shared=True)
    loaded.replace(loaded.read(path, loaded.form(FINGERPRINT)))
    assert loaded.matrix.table.equal(learnt.matrix.shared_entries())
    assert loaded.acceptance.counts.equal(learnt.acceptance.counts)
    # An isolated state has nothing to save.
    is_new = loaded.acceptance.counts.equal(make_state().acceptance.counts)
    assert is_new == (loaded.matrix.num_written == 0) == (scope == "isolated")
    heads = load_file(path)["adjacency_matrix"][:, 0]
    assert ((heads >= 0).sum() == learnt.matrix.num_written) == (scope == "shared")
    assert not (heads[heads >= 0] & 4).any()


OLDER, NEWER = (f"vllm_recycle.adjacency_matrix/{version}" for version in (3, 4))
MATRIX, ACCEPTANCE = "adjacency_matrix", "acceptance"


def put(place: tuple[int, ...], value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """What changes one number of a tensor."""
    return lambda tensor: tensor.index_put([*map(torch.tensor, place)], tensor.new_tensor(value))


@pytest.mark.parametrize(
    ("options", "changed", "message"),
    [
        # Of another model or size.
        ({"vocab_size": VOCAB + 1}, {}, f"vocab_size is {VOCAB + 1}, expected {VOCAB}"),
        ({"k": K + 1}, {}, f"k is {K + 1}, expected {K}"),
        ({"contexts": (1, 3)}, {}, "contexts is [1, 3], expected [1, 2]"),
        ({"slots": 128}, {}, "slots is 128, expected 256"),
        ({}, {"fingerprint": "model-b"}, "fingerprint is model-b, expected model-a"),
        # Of an older format, whose tensors differ too, or of this one with others.
        (
            {},
            {"format": OLDER, ACCEPTANCE: lambda counts: counts[0]},
            f"format is {OLDER}, expected {NEWER}; remove it to learn anew",
        ),
        (
            {},
            {ACCEPTANCE: lambda counts: counts[..., :4, :]},
            "acceptance is torch.float64 [2, 2, 2, 3, 4, 2], expected",
        ),
        # With numbers that cannot be.
        ({}, {MATRIX: put((3, 1), VOCAB)}, "it has numbers that are no token ids"),
        ({}, {MATRIX: put((3, K), -2)}, "it has numbers that are no token ids"),
        ({}, {ACCEPTANCE: put((0, 1, 0, 0, 2, 0), -1.0)}, "it has counts that are none"),
        ({}, {ACCEPTANCE: put((1, 1, 0, 0, 2, 0), 1e9)}, "it has counts that are none"),
        ({}, {ACCEPTANCE: put((1, 0, 1, 2, 4, 1), float("nan"))}, "it has counts that are none"),
        (None, {}, "no adjacency matrix and acceptance: "),
    ],
)
def test_another_file_is_refused(tmp_path, learnt, options, changed, message):
    path = tmp_path / "matrix.safetensors"
    if options is not None:
        state = make_state(**options) if options else learnt
        given = {**state.contents(), **state.facts, "fingerprint": FINGERPRINT}
        for name, change in changed.items():
            given[name] = change(given[name]) if callable(change) else change
        tensors = {name: given.pop(name).contiguous() for name in state.tensors}
        save_file(tensors, path, {name: str(value) for name, value in given.items()})
    before = [tensor.clone() for tensor in learnt.tensors.values()]
    form = learnt.form(FINGERPRINT)
    with pytest.raises(ValueError, match=re.escape(f"state file {path}: {message}")):
        learnt.read(path, form)
    if not message.startswith("it has"):  # what the numbers are is not in the header
        with pytest.raises(ValueError, match=re.escape(f"state file {path}: {message}")):
            form.check(path)
    assert all(map(torch.equal, learnt.tensors.values(), before))


def test_of_two_entries_the_steadier_one_is_taken_and_ours_of_equal_ones():
    def state_of(times: list[int], successor: int) -> TokenRecyclingState:
        """Behind each token a successor, that was said so many times."""
        matrix = make_matrix("shared", contexts=(1,))
        for token, successors in enumerate([[successor] * K] * count for count in times):
            for said in successors:
                write_entries(matrix, [token], 0, said, own=False, shared=True)
        return TokenRecyclingState(matrix)

    ours, theirs = state_of([1, 2, 2, 1, 0], 0), state_of([1, 1, 3, 0, 1], 1)
    counts = ours.acceptance.counts.clone()
    for _ in range(2):
        assert all(ours.merge(theirs.contents()))
        assert ours.matrix.table[:5, 1].tolist() == [0, 0, 1, 0, 1]
    assert ours.acceptance.counts.equal(counts)


def test_entries_that_a_sequence_wrote_for_itself_stay():
    ours = make_state()
    write_entries(ours.matrix, [0, 1], 5, [3] * K, own=True, shared=True)
    before = ours.matrix.table.clone()
    theirs, is_own = torch.ones_like(before), before[:, -1] == 5
    theirs[:, 0] = 8 | MAX_STEADINESS
    assert is_own.sum() == 2
    assert all(ours.merge({"adjacency_matrix": theirs}))
    assert ours.matrix.table.equal(before.where(is_own[:, None], theirs))
