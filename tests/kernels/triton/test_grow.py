"""Trees that the device grows and fills: the same as the core's, bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.growth_settings import Setting, settings_of_growth, some_trunks
from tests.core.recycling_steps import K, make_matrix, write_entries
from tests.core.strategies import trees
from tests.kernels.triton.grown_trees import on_device
from vllm_recycle.core import grow as core
from vllm_recycle.core.adjacency import GREEDY, NUM_CLASSES, SAMPLED
from vllm_recycle.core.grow import Growth, Trunks
from vllm_recycle.core.owners import MAX_SALT
from vllm_recycle.core.tree import Trees, TreeTemplate, load_tree
from vllm_recycle.kernels.triton.matrix.fill import fill
from vllm_recycle.kernels.triton.matrix.find import Texts
from vllm_recycle.kernels.triton.matrix.grow import grow
from vllm_recycle.kernels.triton.trees import DeviceTrees

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_NUM_REQS = 5
# The states of the requests of a batch, in another order.
STATES = [4, 0, 3]


def by_state(values: torch.Tensor, idx_mapping: torch.Tensor) -> torch.Tensor:
    """The values of a batch where those of requests lie."""
    placed = torch.zeros(MAX_NUM_REQS, *values.shape[1:], dtype=values.dtype)
    placed[idx_mapping] = values
    return placed.to(DEVICE)


def draft(function, setting: Setting, num_nodes: int, **given) -> tuple[torch.Tensor, torch.Tensor]:
    """What the device drafts for a setting: tokens and worths, of each node."""
    idx_mapping = torch.tensor(STATES[: len(setting.texts)])
    longest = max(map(len, setting.texts))
    token_ids = torch.tensor([[*text, *[-9] * longest][:longest] for text in setting.texts])
    lengths = torch.tensor([len(text) for text in setting.texts], dtype=torch.int32)
    drafts = torch.full((len(idx_mapping), num_nodes), 99, device=DEVICE)
    worths = torch.full((len(idx_mapping), num_nodes), 99.0, device=DEVICE)
    matrix = copy.copy(setting.matrix)
    matrix.table = matrix.table.to(DEVICE)
    for name in ("salts", "classes"):
        by_text = getattr(matrix, name)[: len(idx_mapping)]
        setattr(matrix, name, by_state(by_text, idx_mapping))
    function(
        drafts,
        worths,
        matrix,
        setting.rates.float().contiguous().to(DEVICE),
        idx_mapping.to(DEVICE),
        Texts(by_state(token_ids.int(), idx_mapping), by_state(lengths, idx_mapping)),
        **given,
    )
    return drafts.cpu(), worths.cpu()


def check(setting: Setting, chains: Collection[int] = ()) -> None:
    """Grow in Triton, and compare with the core; below these texts of the setting chains."""
    idx_mapping = STATES[: len(setting.texts)]
    # The device grows all trees to the same depth.
    setting = replace(setting, max_depths=[setting.levels] * len(idx_mapping))
    expected, of_chains = setting.grow(), setting.grow(ranks=1)
    for field in fields(Growth):
        values, chain_values = getattr(expected, field.name), getattr(of_chains, field.name)
        values[[*chains]] = chain_values[[*chains]]
    trees = DeviceTrees.empty(setting.max_nodes, MAX_NUM_REQS, depth=setting.levels, device=DEVICE)
    trees.are_chains[[idx_mapping[index] for index in chains]] = True
    trunks = setting.trunks
    if trunks is not None:
        trunks = Trunks(trunks.token_ids, trunks.chances.float())
        trunks = Trunks(*(by_state(values, torch.tensor(idx_mapping)) for values in trunks))
    given = {"trees": trees, "beam": setting.beam, "trunks": trunks}
    drafts, worths = draft(grow, setting, setting.max_nodes, **given)
    assert drafts.equal(expected.token_ids)
    assert worths.equal(expected.worths.float())
    right = on_device(Trees.from_parents(expected.parents), idx_mapping, MAX_NUM_REQS)
    for name in ("parents", "depths", "ancestor_bits"):
        assert getattr(trees, name).equal(getattr(right, name)), name


def check_filled(setting: Setting, tree: TreeTemplate) -> None:
    """Fill a template in Triton, and compare with the core."""
    max_depths = [tree.depth] * len(setting.texts)
    setting = replace(setting, rates=setting.rates.float(), max_depths=max_depths)
    expected = core.fill(*setting.arguments, tree=tree)
    drafts, worths = draft(fill, setting, tree.num_nodes, tree=tree.to(DEVICE))
    assert drafts.equal(expected.token_ids)
    assert worths.equal(expected.worths)


@settings(max_examples=60, deadline=None)
@given(setting=settings_of_growth(), data=st.data())
def test_what_is_grown_equals_python(setting, data):
    check(replace(setting, trunks=data.draw(st.none() | some_trunks(len(setting.texts)))))


@settings(max_examples=60, deadline=None)
@given(setting=settings_of_growth(), data=st.data())
def test_chains_are_those_of_python_and_change_no_tree_beside_them(setting, data):
    num_texts = len(setting.texts)
    setting.rates[:] = setting.rates.sort(dim=3, descending=True).values  # the first is the best
    trunks = data.draw(st.none() | some_trunks(num_texts))
    chains = data.draw(st.sets(st.integers(0, num_texts - 1), min_size=1))
    check(replace(setting, trunks=trunks), chains)


def test_successors_that_an_entry_lacks_leave_nothing_to_those_beside_a_trunk():
    matrix = make_matrix(vocab_size=8, contexts=(1, 2), slots=64)
    write_entries(matrix, [1], 1, [5, -1, -1], own=False, shared=True)
    rates = torch.full((NUM_CLASSES, 2, 2, K, 4), 0.5)
    trunks = Trunks(torch.tensor([[[2]]]), torch.tensor([[[0.5]]], dtype=torch.float64))
    setting = Setting(matrix, rates, [[1]], [2], 4, beam=2, levels=2, trunks=trunks)
    assert setting.grow().worths[0, :2].tolist() == [0.5, 0.25]
    check(setting)


def random_setting(k: int, contexts: tuple[int, ...], **options) -> Setting:
    """Three texts of few tokens, of which much is known; large tokens and salts."""
    generator = torch.Generator().manual_seed(k)

    def random_tokens(count: int) -> list[int]:
        return (torch.randint(9, (count,), generator=generator) * 3571).tolist()

    matrix = make_matrix(vocab_size=32_000, k=k, contexts=contexts, slots=1024)
    matrix.salts[:] = torch.tensor([MAX_SALT, 1, 2])
    matrix.classes[:] = torch.tensor([SAMPLED, GREEDY, SAMPLED])
    text = random_tokens(60)
    for end in range(1, len(text)):
        context = text[:end][::-1][: matrix.layout.reach]
        successors = torch.randperm(32_000, generator=generator)[:k].tolist()
        if end % 4:
            # Else what follows is hardly known itself.
            successors = [text[end], *[token for token in successors if token != text[end]]][:k]
        own = end % 2 == 0
        write_entries(matrix, context, MAX_SALT, successors, own=own, shared=True)
    rates = torch.rand(NUM_CLASSES, len(contexts), 2, k, 4, generator=generator)
    texts = [text[:20], text[:5], random_tokens(3)]
    return Setting(matrix, rates, texts, [20, 20, 2], **options)


@pytest.mark.parametrize(
    ("k", "contexts", "max_nodes", "beam", "levels"),
    [
        (8, (1, 2, 4, 16), 80, 16, 8),
        # Full levels before the last.
        (8, (1, 2, 4, 16), 63, 16, 12),
        (8, (1, 2, 3, 4), 15, 15, 12),
        (1, (1,), 1, 1, 1),
        (1, (1, 3), 20, 4, 30),
        (64, (1, 8), 255, 5, 3),
        (5, (1, 2), 31, 200, 5),
    ],
)
def test_any_sizes_equal_python(k, contexts, max_nodes, beam, levels):
    setting = random_setting(k, contexts, max_nodes=max_nodes, beam=beam, levels=levels)
    growth = setting.grow()
    assert int(growth.num_nodes.max()) > min(max_nodes - 1, 3)
    check(setting)


@pytest.mark.parametrize("chance", [1 + 2**-23, 3.0, math.inf, math.nan, -0.5])
def test_chances_that_are_none_make_no_wrong_tree(chance):
    setting = random_setting(8, (1, 2, 4, 16), max_nodes=63, beam=16, levels=12)
    setting.rates[setting.rates > 0.4] = chance
    check(setting)
    check_filled(setting, load_tree("default"))
    chances = torch.tensor([[[chance, 0.25], [0.5, chance]]], dtype=torch.float64)
    trunks = Trunks(torch.tensor([[[7, 9], [11, 13]]]), chances)
    setting = replace(setting, texts=setting.texts[:1], max_depths=[12], trunks=trunks)
    worths, parents = setting.grow().worths, setting.grow().parents[0]
    assert worths.max() <= 1 >= worths.diff().max()
    assert (parents[1:] < torch.arange(1, 64)).all()
    check(setting)


# Templates.


@settings(max_examples=30, deadline=None)
@given(setting=settings_of_growth(), tree=trees(max_nodes=20, k=K))
def test_what_is_filled_equals_python(setting, tree):
    check_filled(setting, tree)


@pytest.mark.parametrize("contexts", [(1,), (1, 2, 4, 16)])
@pytest.mark.parametrize("name", ["paper-80", "default"])
def test_shipped_templates_are_filled_from_any_contexts(name, contexts):
    setting, tree = random_setting(8, contexts, max_nodes=80, beam=16, levels=8), load_tree(name)
    check_filled(setting, tree)
    drafts, _ = draft(fill, setting, tree.num_nodes, tree=tree.to(DEVICE))
    assert int((drafts >= 0).sum()) > 20


@pytest.mark.parametrize("depth", [1, 40, 256])
def test_a_chain_of_any_depth_is_filled(depth):
    matrix = make_matrix("shared", vocab_size=90, contexts=(1,))
    matrix.begin(0)
    for token in range(90):
        successors = [(token + 7) % 90, *range(K - 1)]
        write_entries(matrix, [token], 1, successors, own=False, shared=True)
    rates = torch.ones(NUM_CLASSES, 1, 2, K, 4)
    setting = Setting(matrix, rates, [[5]], [depth], depth)
    tree = TreeTemplate(tuple((row, 0) for row in range(depth)))
    drafts, worths = draft(fill, setting, depth, tree=tree.to(DEVICE))
    assert drafts[0].tolist() == [(5 + 7 * step) % 90 for step in range(1, depth + 1)]
    assert worths.eq(1.0).all()


@pytest.mark.skipif(DEVICE == "cuda", reason="counts calls in the interpreter")
@pytest.mark.parametrize(("max_nodes", "levels"), [(1, 1), (80, 2)])
def test_levels_end_where_none_of_the_next_could_be_among_the_nodes(max_nodes, levels, monkeypatch):
    from vllm_recycle.kernels.triton.matrix import grow as module

    found, looked = module.find_entry, []
    monkeypatch.setattr(module, "find_entry", lambda *args: looked.append(1) or found(*args))
    setting = random_setting(8, (1, 2, 4, 16), max_nodes=max_nodes, beam=16, levels=8)
    check(replace(setting, texts=setting.texts[:1], max_depths=setting.max_depths[:1]))
    assert len(looked) == levels
