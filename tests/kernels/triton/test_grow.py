"""Trees that the device grows, and where it looks for rows: the same as in Python, bit for bit."""

from __future__ import annotations

import pytest
import torch
from growth_settings import Setting, settings_of_growth
from hypothesis import given, settings
from recycling_steps import make_rows

from vllm_recycle.core.adjacency import MAX_SALT, write_entries
from vllm_recycle.kernels.triton.matrix import grow as growing
from vllm_recycle.kernels.triton.trees import DeviceTrees, ancestor_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_NUM_REQS = 5


def check(setting: Setting) -> None:
    """Grow in Triton, for requests in another order than their states, and compare with Python."""
    batch, nodes = len(setting.texts), setting.max_nodes
    expected, expected_worth = setting.grow()
    trees = DeviceTrees.make(MAX_NUM_REQS, nodes, depth=setting.levels, device=DEVICE)
    before = trees.parents.clone()
    idx_mapping = torch.tensor([4, 0, 3])[:batch]
    salts = torch.zeros(MAX_NUM_REQS, dtype=torch.int64)
    salts[idx_mapping] = setting.arguments["salts"]
    drafts = torch.full((batch, nodes), 99, device=DEVICE)
    worth = torch.full((batch, nodes), 99.0, device=DEVICE)
    growing.grow_by_levels(
        drafts,
        worth,
        setting.rows.table.to(DEVICE),
        setting.rates.contiguous().to(DEVICE),
        idx_mapping.to(DEVICE),
        layout=setting.rows.layout,
        salts=salts.to(DEVICE),
        tails=setting.arguments["tails"].to(DEVICE),
        max_depths=setting.arguments["max_depths"].to(DEVICE),
        trees=trees,
        beam=setting.beam,
    )
    assert drafts.cpu().equal(expected.token_ids)
    assert worth.cpu().equal(expected_worth)
    assert trees.parents[idx_mapping].cpu().long().equal(expected.trees.parents)
    assert trees.depths[idx_mapping].cpu().long().equal(expected.trees.depths)
    assert trees.ancestor_bits[idx_mapping].cpu().equal(ancestor_bits(expected.trees.ancestor_mask))
    others = [row for row in range(MAX_NUM_REQS) if row not in idx_mapping.tolist()]
    assert trees.parents[others].equal(before[others])


@settings(max_examples=30, deadline=None)
@given(setting=settings_of_growth())
def test_what_is_grown_equals_python(setting):
    check(setting)


def random_setting(k: int, contexts: tuple[int, ...], **options) -> Setting:
    """Three texts of few tokens, of which much is known; large tokens and salts."""
    generator = torch.Generator().manual_seed(k)

    def random_tokens(count: int) -> list[int]:
        return (torch.randint(9, (count,), generator=generator) * 3571).tolist()

    rows = make_rows(vocab_size=32_000, k=k, contexts=contexts, slots=1024)
    rows.salts[:] = torch.tensor([MAX_SALT, 1, 2])
    text = random_tokens(60)
    for end in range(1, len(text)):
        context = text[:end][::-1][: rows.layout.reach]
        successors = torch.randperm(32_000, generator=generator)[:k].tolist()
        if end % 4:
            # Else what follows is hardly known itself.
            successors = [text[end], *[token for token in successors if token != text[end]]][:k]
        write_entries(
            rows.table, context, MAX_SALT, successors, rows.layout, own=end % 2 == 0, shared=True
        )
    rates = torch.rand(len(contexts), 2, k, 4, generator=generator)
    texts = [text[:20], text[:5], random_tokens(3)]
    return Setting(rows, rates, texts, [20, 20, 2], **options)


@pytest.mark.parametrize(
    ("k", "contexts", "max_nodes", "beam", "levels"),
    [
        (8, (1, 2, 4, 8), 80, 16, 8),
        (8, (1, 2, 3, 4), 15, 15, 12),
        (1, (1,), 1, 1, 1),
        (1, (1, 3), 20, 4, 30),
        (64, (1, 8), 255, 5, 3),
        (5, (1, 2), 31, 200, 5),
    ],
)
def test_any_sizes_equal_python(k, contexts, max_nodes, beam, levels):
    setting = random_setting(k, contexts, max_nodes=max_nodes, beam=beam, levels=levels)
    growth, _ = setting.grow()
    assert int(growth.num_nodes.max()) > min(max_nodes - 1, 3)
    check(setting)


def test_a_request_of_which_nothing_is_known_has_a_tree_without_nodes():
    setting = random_setting(3, (1, 2), max_nodes=4, beam=2, levels=3)
    setting.rows.clear()
    assert not setting.grow()[0].num_nodes.any()
    check(setting)
