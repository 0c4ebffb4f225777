"""The layouts of vLLM's CPU cache, as its own op writes them: reading tokens back, moving them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from tests.kernels.cpu.cache_layouts import every_layout, gather_keys_values, write
from vllm_recycle.kernels.cpu.cache_calls import move_slots
from vllm_recycle.kernels.cpu.kv_cache import slot_elements


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def read(kv_cache: torch.Tensor, slots: torch.Tensor, isa: str) -> torch.Tensor:
    """[slots, 2 * kv_heads * head_size], what the layout says lies at each slot."""
    return kv_cache.view(-1)[slot_elements(slots, shape=kv_cache.shape, isa=isa)]


@every_layout
def test_the_layout_is_one_that_vllm_picks(monkeypatch, layout):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: layout.isa == "amx")
    assert _get_attn_isa(layout.dtype, layout.block_size, layout.head_size) == layout.isa


@every_layout
def test_what_the_layout_says_is_what_vllm_wrote(layout):
    """In all slots, so that each element is of one."""
    blocks = [4, 1, 0, 2, 5, 3]
    slots = torch.tensor(blocks)[:, None] * layout.block_size + torch.arange(layout.block_size)
    keys, values = layout.random_keys_values(layout.num_slots)
    kv_cache = layout.empty_cache()
    # Out of order: a slot's place depends on nothing but the slot.
    order = torch.randperm(layout.num_slots)
    write(kv_cache, keys[order], values[order], slots.flatten()[order], layout.isa)
    found = gather_keys_values(kv_cache, blocks, layout.isa)
    assert found[0].equal(keys)
    assert found[1].equal(values)


MOVES = {
    "within a block": ([7, 9, 30], [3, 4, 5]),
    "across blocks": ([31, 40, 70], [2, 31 + 3, 100]),
    "overlapping upwards": ([1, 2, 3, 4], [2, 3, 4, 5]),
    "overlapping downwards": ([34, 33, 32, 31], [33, 32, 31, 30]),
    "exchanged": ([5, 68], [68, 5]),
    "one to several": ([6, 6], [1, 90]),
    "nothing": ([], []),
}


@every_layout
@pytest.mark.parametrize("moves", MOVES.values(), ids=MOVES)
def test_moved_slots_hold_their_sources_and_all_others_what_they_held(layout, moves):
    """As in caches that vLLM wrote in the final order, in each of two layers."""
    source, target = (torch.tensor(slots, dtype=torch.int64) for slots in moves)
    all_slots = torch.arange(layout.num_slots)
    origin = all_slots.clone()
    origin[target] = source
    layers, expected = [], []
    for _ in range(2):
        keys, values = layout.random_keys_values(layout.num_slots)
        layers.append(layout.empty_cache())
        write(layers[-1], keys, values, all_slots, layout.isa)
        expected.append(layout.empty_cache())
        write(expected[-1], keys[origin], values[origin], all_slots, layout.isa)
    move_slots(layers, source, target, isa=layout.isa)
    for layer, right in zip(layers, expected, strict=True):
        assert read(layer, all_slots, layout.isa).equal(read(right, all_slots, layout.isa))


def test_an_unknown_isa_is_refused():
    kv_cache = torch.zeros(1, 1, 32, 64)
    with pytest.raises(ValueError, match=r"got isa 'neon', expected one of \('amx', 'vec'"):
        move_slots([kv_cache], torch.tensor([0]), torch.tensor([1]), isa="neon")


@pytest.mark.parametrize("size", [4, 6])
def test_a_cache_whose_pages_are_padded_is_refused(size):
    kv_cache = torch.zeros(2, 2, 32, 2 * size)[..., :8]
    slots = torch.tensor([1])
    with pytest.raises(AssertionError) if size > 4 else nullcontext():
        move_slots([kv_cache], slots, slots + 1, isa="vec")
