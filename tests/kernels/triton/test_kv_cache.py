"""Moving accepted paths in a paged cache in Triton: as the torch twin does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.triton import torch_twins
from vllm_recycle.kernels.triton.kv_cache import compact_path
from vllm_recycle.kernels.triton.paged_layers import PagedLayers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE, NUM_BLOCKS = 8, 16
NUM_SLOTS = BLOCK_SIZE * NUM_BLOCKS
# Layers, blocks, heads and tokens of a block, as vLLM stores them, and back in this order.
STORAGES = {
    "by heads": (0, 1, 2, 3),
    "by tokens": (0, 1, 3, 2),
    "layers within blocks": (1, 0, 2, 3),
}
# Of one token in a head: moved in 8, 4 and 2 bytes at a time, and in several parts of a program's.
SHAPES = [(2, 32), (3, 6), (1, 10), (5, 420)]


def make_caches(
    num_layers: int, heads: int, width: int, dtype: torch.dtype, storage: str = "by heads"
) -> list[torch.Tensor]:
    """Layers [blocks, heads, block_size, width] in one of the orders that vLLM stores them in."""
    order = STORAGES[storage]
    sizes = [(num_layers, NUM_BLOCKS, heads, BLOCK_SIZE)[axis] for axis in order]
    memory = torch.randn(*sizes, width).to(DEVICE, dtype)
    return list(memory.permute(*order, 4).unbind())  # each order is its own inverse


def rows_of(
    slot_mapping: list[int], logits_indices: list[int], starts: list[int], path: list[list[int]]
) -> list[torch.Tensor]:
    """Which slots a step's rows have, and the paths that were accepted."""
    lists = (slot_mapping, logits_indices, starts, path)
    slots, rows, starts, path = (torch.tensor(values, device=DEVICE) for values in lists)
    return [slots, rows, starts.int(), path]


@st.composite
def steps(draw) -> list[torch.Tensor]:
    """One to three sequences with ascending paths of any length, in slots anywhere."""
    path, starts = [], [0]
    for _ in range(draw(st.integers(1, 3))):
        below = draw(st.sets(st.integers(1, 25), max_size=20))
        path.append([0, *sorted(below)])
        starts.append(starts[-1] + path[-1][-1] + 1 + draw(st.integers(0, 3)))
    width = max(map(len, path)) + draw(st.integers(0, 2))
    num_tokens = starts[-1] + draw(st.integers(0, 10))
    return rows_of(
        draw(st.permutations(range(NUM_SLOTS)))[:num_tokens],
        draw(st.permutations(range(num_tokens)))[: starts[-1]],
        starts,
        [[*rows, *[-1] * (width - len(rows))] for rows in path],
    )


@settings(max_examples=40, deadline=None)
@given(
    step=steps(),
    starts_type=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]),
    shape=st.sampled_from(SHAPES),
    storage=st.sampled_from([*STORAGES]),
    num_layers=st.integers(1, 3),
)
def test_the_path_is_moved_as_the_twin_moves_it(
    step, starts_type, dtype, shape, storage, num_layers
):
    kv_caches = make_caches(num_layers, *shape, dtype, storage)
    expected = [layer.clone() for layer in kv_caches]
    step[2] = step[2].to(starts_type)
    compact_path(PagedLayers.make(kv_caches), *step)
    torch_twins.compact_path(PagedLayers.make(expected), *step)
    for layer, right in zip(kv_caches, expected, strict=True):
        # As bytes, so that one zero is not the other.
        assert torch.equal(*(x.contiguous().view(torch.uint8) for x in (layer, right)))


def test_a_path_of_the_first_rows_moves_nothing():
    # Slots that do not exist: nothing is read or written through them.
    step = rows_of([10**9] * 6, [*range(6)], [0, 1, 6], [[0, -1, -1, -1], [0, 1, 2, -1]])
    (kv_cache,) = make_caches(1, 2, 16, torch.bfloat16)
    before = kv_cache.clone()
    compact_path(PagedLayers.make([kv_cache]), *step)
    assert kv_cache.equal(before)


def test_layers_that_share_memory_are_moved_once():
    first, second = make_caches(2, 2, 16, torch.bfloat16)
    layers = PagedLayers.make([first, second, first, second.view(second.shape)])
    assert len(layers.kv_caches) == len(layers.pointers) == 2
    # Moved twice, place 1 would get what place 2 holds after the first time.
    before = torch.stack([first, second])[:, 0].clone()
    compact_path(layers, *rows_of([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 5], [[0, 2, 3, 4]]))
    assert first[0, :, 1:4].equal(before[0, :, 2:5])
    assert second[0, :, 1:4].equal(before[1, :, 2:5])


@pytest.mark.parametrize(
    ("dtype", "width", "grain"),
    [
        (torch.bfloat16, 32, 8),
        (torch.bfloat16, 6, 4),
        (torch.bfloat16, 5, 2),
        (torch.float32, 3, 4),
        (torch.float8_e4m3fn, 3, 1),
    ],
)
def test_the_grain_divides_what_is_moved_and_every_address(dtype, width, grain):
    layers = make_caches(2, 3, width, dtype)
    assert PagedLayers.make(layers).grain == grain
    size = layers[0].numel()
    odd = torch.zeros(1 + size, dtype=dtype, device=DEVICE)[1:].view_as(layers[0])
    assert PagedLayers.make([layers[0], odd]).grain == min(grain, dtype.itemsize)


CACHE = torch.zeros(4, 2, 8, 16)


@pytest.mark.parametrize(
    "kv_caches",
    [
        [CACHE, CACHE.half()],
        [CACHE, torch.zeros(5, 2, 8, 16)],
        [CACHE, torch.zeros(4, 8, 2, 16).transpose(1, 2)],
        [CACHE[0]],
        [CACHE.transpose(2, 3)],
    ],
)
def test_caches_that_cannot_be_moved_together_are_no_layers(kv_caches):
    with pytest.raises(AssertionError):
        PagedLayers.make(kv_caches)
