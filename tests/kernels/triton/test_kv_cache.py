"""Moving accepted paths in a paged cache: against a plain loop, in torch and in Triton."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.triton import torch_twins
from vllm_recycle.kernels.triton import kv_cache
from vllm_recycle.kernels.triton.accepted_rows import move_rows
from vllm_recycle.kernels.triton.paged_layers import PagedLayers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUNCTIONS = [torch_twins.compact_path, kv_cache.compact_path]
BLOCK_SIZE, NUM_BLOCKS = 8, 16
NUM_SLOTS = BLOCK_SIZE * NUM_BLOCKS
STORAGES = ["by heads", "by tokens", "layers within blocks"]
# Of one token in a head: moved in 8, 4 and 2 bytes at a time, and in several parts of a program's.
SHAPES = [(2, 32), (3, 6), (1, 10), (5, 420)]

either = pytest.mark.parametrize("compact_path", FUNCTIONS, ids=["torch", "triton"])


def make_caches(
    num_layers: int, heads: int, width: int, dtype: torch.dtype, storage: str = "by heads"
) -> list[torch.Tensor]:
    """Layers [blocks, heads, block_size, width] in one of the orders that vLLM stores them in."""
    order = {
        "by heads": (num_layers, NUM_BLOCKS, heads, BLOCK_SIZE, width),
        "by tokens": (num_layers, NUM_BLOCKS, BLOCK_SIZE, heads, width),
        "layers within blocks": (NUM_BLOCKS, num_layers, heads, BLOCK_SIZE, width),
    }[storage]
    memory = torch.randn(order).to(DEVICE, dtype)
    if storage == "layers within blocks":
        return list(memory.unbind(1))
    return [layer.transpose(1, 2) if storage == "by tokens" else layer for layer in memory]


@dataclass(frozen=True)
class Step:
    """Which slots a step's rows have, and the paths that were accepted."""

    slot_mapping: list[int]
    logits_indices: list[int]
    cu_num_logits: list[int]
    path: list[list[int]]

    def tensors(self, starts_type: torch.dtype = torch.int32) -> list[torch.Tensor]:
        lists = (self.slot_mapping, self.logits_indices, self.cu_num_logits, self.path)
        slots, rows, starts, path = (torch.tensor(values, device=DEVICE) for values in lists)
        return [slots, rows, starts.to(starts_type), path]

    def moves(self, places: list[int] | None = None) -> list[tuple[int, int]]:
        """Slots to read and to write; or the places of logit rows."""
        if places is None:
            places = [self.slot_mapping[row] for row in self.logits_indices]
        return [
            (places[start + source], places[start + target])
            for start, rows in zip(self.cu_num_logits[:-1], self.path, strict=True)
            for target, source in enumerate(rows)
            if source > target
        ]

    def moved(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """A copy of a layer, moved in a plain loop."""
        result = kv_cache.clone()
        for source, target in self.moves():
            read, write = (divmod(slot, BLOCK_SIZE) for slot in (source, target))
            result[write[0], :, write[1]] = kv_cache[read[0], :, read[1]]
        return result


@st.composite
def steps(draw) -> Step:
    """One to three sequences with ascending paths of any length, in slots anywhere."""
    path, num_rows = [], []
    for _ in range(draw(st.integers(1, 3))):
        below = draw(st.sets(st.integers(1, 25), max_size=20))
        path.append([0, *sorted(below)])
        num_rows.append(path[-1][-1] + 1 + draw(st.integers(0, 3)))
    width = max(map(len, path)) + draw(st.integers(0, 2))
    num_tokens = sum(num_rows) + draw(st.integers(0, 10))
    return Step(
        slot_mapping=draw(st.permutations(range(NUM_SLOTS)))[:num_tokens],
        logits_indices=draw(st.permutations(range(num_tokens)))[: sum(num_rows)],
        cu_num_logits=[sum(num_rows[:index]) for index in range(len(num_rows) + 1)],
        path=[[*rows, *[-1] * (width - len(rows))] for rows in path],
    )


@either
@settings(max_examples=40, deadline=None)
@given(
    step=steps(),
    starts_type=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]),
    shape=st.sampled_from(SHAPES),
    storage=st.sampled_from(STORAGES),
    num_layers=st.integers(1, 3),
)
def test_the_path_is_moved_as_a_plain_loop_moves_it(
    compact_path, step, starts_type, dtype, shape, storage, num_layers
):
    kv_caches = make_caches(num_layers, *shape, dtype, storage)
    expected = [step.moved(layer) for layer in kv_caches]
    compact_path(PagedLayers.make(kv_caches), *step.tensors(starts_type))
    for layer, right in zip(kv_caches, expected, strict=True):
        # As bytes, so that one zero is not the other.
        assert torch.equal(*(x.contiguous().view(torch.uint8) for x in (layer, right)))


@either
def test_a_path_of_the_first_rows_moves_nothing(compact_path):
    step = Step(
        # Slots that do not exist: nothing is read or written through them.
        slot_mapping=[10**9] * 6,
        logits_indices=list(range(6)),
        cu_num_logits=[0, 1, 6],
        path=[[0, -1, -1, -1], [0, 1, 2, -1]],
    )
    (kv_cache,) = make_caches(1, 2, 16, torch.bfloat16)
    before = kv_cache.clone()
    compact_path(PagedLayers.make([kv_cache]), *step.tensors())
    assert kv_cache.equal(before)


@settings(max_examples=40, deadline=None)
@given(
    step=steps(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int32, torch.int64]),
    width=st.sampled_from([None, 1, 10, 300]),
)
def test_rows_of_a_step_are_moved_as_a_plain_loop_moves_them(step, dtype, width):
    shape = (len(step.slot_mapping), *([] if width is None else [width]))
    rows = torch.randint(0, 10**6, shape, device=DEVICE).to(dtype)
    expected = rows.clone()
    for source, target in step.moves(step.logits_indices):
        expected[target] = rows[source]
    move_rows(rows, *step.tensors()[1:])
    assert rows.equal(expected)


@either
def test_layers_that_share_memory_are_moved_once(compact_path):
    first, second = make_caches(2, 2, 16, torch.bfloat16)
    layers = PagedLayers.make([first, second, first, second.view(second.shape)])
    assert len(layers.kv_caches) == len(layers.pointers) == 2
    # Moved twice, place 1 would get what place 2 holds after the first time.
    step = Step([0, 3, 6, 9, 12], [0, 1, 2, 3, 4], [0, 5], [[0, 2, 3, 4]])
    expected = [step.moved(first), step.moved(second)]
    compact_path(layers, *step.tensors())
    assert first.equal(expected[0])
    assert second.equal(expected[1])


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
def test_the_grain_divides_what_is_moved(dtype, width, grain):
    assert PagedLayers.make(make_caches(2, 3, width, dtype)).grain == grain


def test_the_grain_divides_every_address():
    memory = torch.zeros(1 + 2 * 3 * BLOCK_SIZE * 8, dtype=torch.bfloat16, device=DEVICE)
    aligned = memory[:-1].view(2, 3, BLOCK_SIZE, 8)
    odd = memory[1:].view(2, 3, BLOCK_SIZE, 8)
    assert PagedLayers.make([aligned]).grain == 8
    assert PagedLayers.make([aligned, odd]).grain == 2


CACHE = torch.zeros(4, 2, 8, 16)


@pytest.mark.parametrize(
    ("kv_caches", "message"),
    [
        ([], "KV caches: got none, expected one or more"),
        ([CACHE, CACHE.half()], "KV cache 1: got torch.float16 [4, 2, 8, 16] with strides"),
        ([CACHE, torch.zeros(5, 2, 8, 16)], "KV cache 1: got torch.float32 [5, 2, 8, 16]"),
        ([CACHE, torch.zeros(4, 8, 2, 16).transpose(1, 2)], "with strides [256, 16, 32, 1] on"),
        ([CACHE[0]], "KV cache 0: got torch.float32 [2, 8, 16]"),
        ([CACHE.transpose(2, 3)], "with a contiguous last dimension"),
    ],
)
def test_caches_that_cannot_be_moved_together_are_refused(kv_caches, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PagedLayers.make(kv_caches)
