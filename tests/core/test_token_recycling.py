"""Token Recycling from end to end with a toy target, and the file of what was learnt."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

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
    proposer.begin(req_state_idx, torch.tensor(prompt))
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
        proposer.begin(req_state_idx, torch.tensor(text))
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
        proposer.begin(req_state_idx, torch.tensor([0]))
    if whose is None and scope == "isolated":
        with pytest.raises(ValueError, match="scope is 'isolated', expected one with shared"):
            proposer.take_in(torch.tensor(text))
        assert matrix.num_written == 0
        return
    proposer.take_in(torch.tensor(text), whose)
    is_shared = whose is None or scope == "shared"
    assert ((matrix.shared_entries()[:, 0] >= 0).sum() == matrix.num_written) == is_shared
    drafts, _ = propose(proposer, torch.tensor([0, 1]), [text[:9], text[:9]])
    knows = [draft[0] == text[9] for draft in drafts.tolist()]
    assert knows == [is_shared or whose == req_state_idx for req_state_idx in (0, 1)]


def test_a_longer_context_makes_it_fewer_steps():
    steps = [
        steps_of(make_proposer(contexts=contexts), 0, [1, 1], 80) for contexts in ((1,), (1, 2))
    ]
    assert steps[1] < 0.7 * steps[0]


def test_a_request_starts_from_what_others_left_only_where_entries_are_shared():
    for scope, starts_warm in (("sequence", True), ("shared", True), ("isolated", False)):
        proposer = make_proposer(scope=scope)
        first, second = (steps_of(proposer, 0, [1, 1], 30) for _ in range(2))
        assert (second < 0.7 * first) == starts_warm


def test_a_prompt_is_drafted_from_at_once():
    prompt = greedy([1, 1], 18)
    seeded, not_seeded = make_proposer(), make_proposer()
    not_seeded.seed_from_prompt = False
    assert steps_of(seeded, 0, prompt, 36) < 0.7 * steps_of(not_seeded, 0, prompt, 36)


@st.composite
def any_trees(draw, batch: int, nodes: int) -> Trees:
    below = st.lists(st.integers(0, nodes), min_size=nodes, max_size=nodes)
    drawn = [draw(below) for _ in range(batch)]
    parents = [[0, *(back % (row + 1) for row, back in enumerate(backs))] for backs in drawn]
    return Trees.from_parents(torch.tensor(parents))


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
        proposer.begin(req_state_idx, torch.tensor(text))
    for _ in range(6):
        max_depths = [chance.choice([0, 1, 2, 50]) for _ in texts]
        drafts, trees = propose(proposer, idx_mapping, texts, max_depths)
        # Up to the last node that is filled.
        counts = torch.arange(1, nodes + 1).where(drafts >= 0, 0).max(1).values.tolist()
        assert bool((trees.depths <= nodes).all())
        if chance.random() < 0.3:  # drafts of another kind: often right, at times one text twice
            trees = data.draw(any_trees(batch, nodes))
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
    with pytest.raises(ValueError, match=f"rank {K} is not below k = {K}"):
        make_proposer(tree=TreeTemplate(((0, K),)))


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


@pytest.fixture
def learnt() -> TokenRecyclingState:
    proposer = make_proposer()
    steps_of(proposer, 0, [1, 1], 30)
    return proposer.state


def make_state(**options) -> TokenRecyclingState:
    return TokenRecyclingState(make_matrix(**options))


def test_a_saved_state_is_loaded_without_what_requests_wrote_for_themselves(tmp_path, learnt):
    path = tmp_path / "matrix.safetensors"
    learnt.save(path, fingerprint=FINGERPRINT)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    loaded = make_state()
    write_entries(loaded.matrix, [4, 5], 1, [1] * K, own=True, shared=True)
    loaded.load(path, fingerprint=FINGERPRINT)
    assert loaded.matrix.table.equal(learnt.matrix.shared_entries())
    assert loaded.acceptance.counts.equal(learnt.acceptance.counts)
    assert not loaded.acceptance.counts.equal(make_state().acceptance.counts)
    with safe_open(str(path), "pt") as file:
        heads = file.get_tensor("adjacency_matrix")[:, 0]
    assert 0 < (heads >= 0).sum() < learnt.matrix.num_written
    assert not (heads[heads >= 0] & 4).any()


def test_an_isolated_state_has_nothing_to_save(tmp_path):
    proposer = make_proposer(scope="isolated")
    steps_of(proposer, 0, [1, 1], 30)
    proposer.state.save(tmp_path / "matrix", fingerprint=FINGERPRINT)
    loaded = make_state()
    loaded.load(tmp_path / "matrix", fingerprint=FINGERPRINT)
    assert loaded.matrix.num_written == 0
    assert loaded.acceptance.counts.equal(make_state().acceptance.counts)


@pytest.mark.parametrize(
    ("saved_as", "message"),
    [
        ({"vocab_size": VOCAB + 1}, f"vocab_size is {VOCAB + 1}, expected {VOCAB}"),
        ({"k": K + 1}, f"k is {K + 1}, expected {K}"),
        ({"contexts": (1, 3)}, "contexts is [1, 3], expected [1, 2]"),
        ({"slots": 128}, "slots is 128, expected 256"),
        ({"fingerprint": "model-b"}, "fingerprint is model-b, expected model-a"),
    ],
)
def test_a_state_of_another_model_or_size_is_refused(tmp_path, learnt, saved_as, message):
    path = tmp_path / "matrix.safetensors"
    fingerprint = saved_as.pop("fingerprint", FINGERPRINT)
    make_state(**saved_as).save(path, fingerprint=fingerprint)
    refuses_to_load(learnt, path, message)


def save_with(state: TokenRecyclingState, path, **changed) -> None:
    """A file like that of a state, with other facts or tensors."""
    given = {**state.contents(), **state.facts, "fingerprint": FINGERPRINT, **changed}
    tensors = {name: given.pop(name).contiguous() for name in state.tensors}
    save_file(tensors, path, {name: str(value) for name, value in given.items()})


def test_a_file_of_an_older_format_is_refused_by_name(tmp_path, learnt):
    path, older = tmp_path / "matrix.safetensors", "vllm_recycle.adjacency_matrix/3"
    save_with(learnt, path, format=older, acceptance=learnt.acceptance.counts[0])
    expected = (
        f"format is {older}, expected vllm_recycle.adjacency_matrix/4; remove it to learn anew"
    )
    refuses_to_load(learnt, path, expected)
    with pytest.raises(ValueError, match=re.escape(expected)):
        learnt.check(path, fingerprint=FINGERPRINT)


def test_no_file_and_one_of_other_tensors_are_refused(tmp_path, learnt):
    path = tmp_path / "matrix.safetensors"
    refuses_to_load(learnt, path, "no adjacency matrix and acceptance: ")
    save_with(learnt, path, acceptance=learnt.places["acceptance"][..., :4, :])
    refuses_to_load(learnt, path, "acceptance is torch.float64 [2, 2, 2, 3, 4, 2], expected")


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("adjacency_matrix", (3, 1), VOCAB, "it has numbers that are no token ids"),
        ("adjacency_matrix", (3, K), -2, "it has numbers that are no token ids"),
        ("acceptance", (0, 1, 0, 0, 2, 0), -1.0, "it has counts that are none"),
        ("acceptance", (1, 1, 0, 0, 2, 0), 1e9, "it has counts that are none"),
        ("acceptance", (1, 0, 1, 2, 4, 1), float("nan"), "it has counts that are none"),
    ],
)
def test_a_state_with_impossible_numbers_is_refused(tmp_path, learnt, name, place, value, message):
    path = tmp_path / "matrix.safetensors"
    tensor = learnt.contents()[name].clone()
    tensor[place] = value
    save_with(learnt, path, **{name: tensor})
    refuses_to_load(learnt, path, message)


def refuses_to_load(state: TokenRecyclingState, path, message: str) -> None:
    before = [tensor.clone() for tensor in state.tensors.values()]
    with pytest.raises(ValueError, match=re.escape(f"state file {path}: {message}")):
        state.load(path, fingerprint=FINGERPRINT)
    assert all(map(torch.equal, state.tensors.values(), before))


def test_of_two_entries_the_steadier_one_is_taken_and_ours_of_equal_ones():
    def state_of(*written: tuple[int, int, int]) -> TokenRecyclingState:
        """Behind each token a successor, that was said so many times."""
        matrix = make_matrix("shared", contexts=(1,))
        for token, successor, times in written:
            for _ in range(times):
                write_entries(matrix, [token], 0, [successor] * K, own=False, shared=True)
        return TokenRecyclingState(matrix)

    ours = state_of((0, 0, 1), (1, 0, 2), (2, 0, 2), (3, 0, 1))
    theirs = state_of((0, 1, 1), (1, 1, 1), (2, 1, 3), (4, 1, 1))
    counts = ours.acceptance.counts.clone()
    for _ in range(2):
        assert all(ours.merge(theirs.contents()))
        assert ours.matrix.table[:5, 1].tolist() == [0, 0, 1, 0, 1]
    assert ours.acceptance.counts.equal(counts)


def test_entries_that_a_sequence_wrote_for_itself_stay():
    theirs = TokenRecyclingState(make_matrix("sequence", contexts=(1, 2)))
    table = theirs.matrix.table
    table[:] = 1
    table[:, 0] = 8 | MAX_STEADINESS
    ours = TokenRecyclingState(make_matrix("sequence", contexts=(1, 2)))
    write_entries(ours.matrix, [0, 1], 5, [3] * K, own=True, shared=True)
    before = ours.matrix.table.clone()
    is_own = before[:, -1] == 5
    assert is_own.sum() == 2
    assert all(ours.merge({"adjacency_matrix": table}))
    assert ours.matrix.table[is_own].equal(before[is_own])
    assert ours.matrix.table[~is_own].equal(table[~is_own])
