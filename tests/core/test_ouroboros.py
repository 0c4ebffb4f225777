"""The published Ouroboros: one written plainly by hand, and the package's against that one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.recycling_steps import texts_of_rows
from tests.core.slow_ouroboros import Round, Sequence, SlowOuroboros
from tests.core.strategies import BRIEF
from vllm_recycle.core.paper.draft_shape import DraftShape
from vllm_recycle.core.paper.ouroboros import OuroborosProposer
from vllm_recycle.core.verification import walk

VOCAB = 10
SIZES = {"gamma": 4, "window": 1, "guesses": 2, "phrase_length": 4, "branches": 2}


class Model:
    """One for the plain Ouroboros, which says a function of all that a row sees."""

    def __init__(self, following: Callable[[list[int]], int]) -> None:
        self.following = following

    def __call__(self, token_ids, attention_mask, position_ids):
        said, tokens = [], token_ids[0].tolist()
        for row, place in enumerate(position_ids[0].tolist()):
            seen = (attention_mask[0, 0, row] == 0).nonzero().flatten().tolist()
            past = {int(position_ids[0, other]): tokens[other] for other in seen}
            assert len(past) == len(seen) == place + 1
            said.append(self.following([past[earlier] for earlier in range(place + 1)]))
        return SimpleNamespace(logits=torch.eye(VOCAB)[said][None])


def one_more(text: list[int]) -> int:
    return (text[-1] + 1) % VOCAB


def but_behind_four(text: list[int]) -> int:
    return 7 if text[-1] == 4 else one_more(text)


def test_rounds_by_hand():
    slow = SlowOuroboros(Model(but_behind_four), Model(one_more), **SIZES)
    sequence = slow.begin_behind([2])
    assert slow.step(sequence) == Round(4, [4, 5, 6, 7], [], [4, 7])
    # Of the window, and behind the mistake (6, 7, 8).
    assert slow.pool == {4: [(2, 3, 4)], 5: [(3, 4, 5), (6, 7, 8)], 6: [(4, 5, 6)]}
    assert sequence == Sequence([2, 3, 4, 7], [[5], [6]])

    assert slow.step(sequence) == Round(4, [8, 9, 0, 1], [], [8, 9, 0, 1, 2])
    assert slow.pool[7] == [(5, 6, 7), (8, 9, 0)]
    assert slow.pool[9] == [(7, 8, 9), (0, 1, 2)]

    # Four forwards for 3, 4, 5 and (6, 7, 8) with its bonus, cut; 6 has a phrase to go on with.
    assert slow.step(sequence) == Round(4, [3, 4, 5, 6], [(4, 5, 6)], [3, 4, 7])
    assert sequence == Sequence([2, 3, 4, 7, 8, 9, 0, 1, 2, 3, 4, 7], [[3], [4]])


@pytest.mark.parametrize(
    ("known", "learnt"),
    [
        # Right to 7, and not at all; a third was not tried.
        ([(1, 1, 1), (0, 0, 0), (6, 7, 9)], [(1, 1, 1), (6, 1, 1), (6, 7, 8)]),
        # The older one is right to its end.
        ([(6, 7, 8), (9, 9, 9)], [(6, 7, 8), (6, 0, 0)]),
        # One is corrected to what the other was.
        ([(0, 0, 0), (6, 1, 1)], [(6, 1, 1), (6, 7, 2)]),
    ],
)
def test_branches_are_replaced_by_what_the_target_said(known, learnt):
    options = SIZES | {"gamma": 2, "guesses": 3}
    slow = SlowOuroboros(Model(one_more), Model(one_more), **options)
    slow.pool[5] = list(known)
    result = slow.step(slow.begin_behind([2]))
    assert (result.trunk, result.branches) == ([4, 5], known[:-3:-1])
    assert slow.pool[5] == learnt


def reads_all(odd: int) -> Callable[[list[int]], int]:
    """What follows is a sum over the text, and one more each so many sums."""

    def following(text: list[int]) -> int:
        total = sum(back % 7 * token for back, token in enumerate(reversed(text), start=2))
        return (total + (total % odd == 0)) % 7

    return following


TARGET, DRAFT = reads_all(5), reads_all(100)


class ToyDraftModel:
    """The same model for the package: the rows of a forward are a tree behind what it has read."""

    def __init__(self, parents: list[int], texts: dict[int, list[int]]) -> None:
        self.parents, self.read = parents, {b: text[:-1] for b, text in texts.items()}

    def choose(self, idx_mapping, new_token_ids, row_token_ids, choices):
        assert choices == 1
        said = []
        triples = (idx_mapping.tolist(), new_token_ids.tolist(), row_token_ids.tolist())
        for b, new, rows in zip(*triples, strict=True):
            self.read[b] += [token for token in new if token >= 0]
            assert len(rows) == len(self.parents) - 1
            said.append([*map(DRAFT, texts_of_rows(self.read[b], self.parents, rows))])
        return torch.tensor(said)[:, :, None], torch.zeros(len(said), len(said[0]), 1)


def verify(
    proposer: OuroborosProposer,
    texts: dict[int, list[int]],
    counts: list[int],
    *,
    ends_early: bool,
):
    """A round of the package; returns its drafts, of which so many nodes were verified."""
    idx_mapping, parents = torch.tensor([*texts]), proposer.tree.parents.tolist()
    last = torch.tensor([text[-1] for text in texts.values()])
    model = ToyDraftModel(proposer.lookahead.parents.tolist(), texts)
    most = torch.full_like(last, proposer.shape.gamma) if ends_early else None
    drafts = proposer.propose(idx_mapping, last, draft_model=model, max_lengths=most)
    rows, said = [], []
    for text, draft, count in zip(texts.values(), drafts.tolist(), counts, strict=True):
        rows += [text[-1], *draft[:count]]
        said += map(TARGET, texts_of_rows(text, parents, draft[:count]))
    num_rows = 1 + torch.tensor(counts)
    starts = torch.nn.functional.pad(num_rows.cumsum(0), (1, 0))
    proposer.observe(idx_mapping, torch.tensor(rows), torch.eye(VOCAB)[said], starts)
    trees = proposer.tree.of_batch(len(texts))
    walked = walk(torch.tensor(said), drafts, starts, trees=trees)
    for text, tokens in zip(texts.values(), walked.token_ids.tolist(), strict=True):
        text += [token for token in tokens if token >= 0]
    return drafts


sizes = {
    "gamma": st.integers(1, 6),
    "window": st.integers(0, 4),
    "guesses": st.integers(0, 4),
    "phrase_length": st.integers(3, 6),
    "branches": st.integers(0, 3),
}
switches = {
    "max_forwards": st.none() | st.integers(1, 3),
    "harvest_trunk": st.booleans(),
    "harvest_branches": st.booleans(),
}
prompt = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@BRIEF
@given(
    prompts=st.tuples(prompt, prompt),
    sizes=st.fixed_dictionaries(sizes).filter(lambda sizes: sizes["window"] + sizes["guesses"]),
    switches=st.fixed_dictionaries(switches),
    shares_pool=st.booleans(),
    data=st.data(),
)
def test_rounds_are_those_that_are_written_plainly(prompts, sizes, switches, shares_pool, data):
    shape = DraftShape(**sizes, **switches)
    given = {"vocab_size": VOCAB, "max_num_reqs": 2, "shares_pool": shares_pool}
    proposer = OuroborosProposer(shape, **given)
    made = [SlowOuroboros(Model(TARGET), Model(DRAFT), **sizes, **switches) for _ in range(2)]
    slow = [made[0], made[0]] if shares_pool else made
    # Where the pool is shared one comes after the other; else they run beside each other.
    for batch in [[1], [0]] if shares_pool else [[1, 0]]:
        for b in batch:
            proposer.begin(b, torch.tensor(prompts[b]))
        sequences = {b: slow[b].begin_behind(prompts[b]) for b in batch}
        texts = {b: [*sequence.token_ids] for b, sequence in sequences.items()}
        for _ in range(5):
            most = st.integers(0, shape.num_nodes) | st.just(shape.num_nodes)
            counts = [data.draw(most) for _ in batch]
            drafts = verify(proposer, texts, counts, ends_early=data.draw(st.booleans()))
            for b, count, draft in zip(batch, counts, drafts.tolist(), strict=True):
                before = [*sequences[b].token_ids]
                done = slow[b].step(sequences[b], most_nodes=count)
                branches = [tokens for one in done.branches for tokens in one]
                missing = [-1] * (shape.gamma - len(done.trunk))
                told = [*done.trunk, *missing, *branches]
                assert draft == [*told, *[-1] * (shape.num_nodes - len(told))]
                assert texts[b] == sequences[b].token_ids
                # Both are greedy decoding.
                for end in range(len(before), len(texts[b])):
                    assert texts[b][end] == TARGET(texts[b][:end])
                for place, token in enumerate(
                    done.trunk if switches["max_forwards"] is None else ()
                ):
                    assert token == DRAFT(before + done.trunk[:place])
    places = proposer.pool.phrases.view(-1, VOCAB, *proposer.pool.phrases.shape[1:]).tolist()
    for pool, known in zip(places, made, strict=False):
        there = [[tuple(one) for one in phrases if one[0] >= 0] for phrases in pool]
        assert there == [known.pool.get(token, []) for token in range(VOCAB)]
