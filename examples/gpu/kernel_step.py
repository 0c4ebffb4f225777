"""The small kernels of a step for `kernels.py`: inputs, launches in order, and whether they agree.

They place the rows of trees, walk the trees and compact the KV; `kernel_grown` has what drafts and
learns.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from kernel_attention import BLOCK_SIZE
from kernel_timing import DEVICE, Call, Peaks, count, host_us, in_turn, measure, random, random_ids
from torch_twins import compact_path as torch_compact_path
from torch_twins import place_tree_rows as torch_place_tree_rows

from vllm_recycle.core import WalkResult, load_tree, reference
from vllm_recycle.kernels.triton.inputs import place_tree_rows
from vllm_recycle.kernels.triton.kv_cache import compact_path
from vllm_recycle.kernels.triton.paged_layers import PagedLayers
from vllm_recycle.kernels.triton.trees import DeviceTrees
from vllm_recycle.kernels.triton.walk import walk

CONTEXT = 5  # before the rows, so that they do not begin with a block
MOVED_ROWS = 4  # at most, of a path


@dataclass(frozen=True, slots=True)
class StepCase:
    batch: int
    rows: int  # of a request
    vocab: int = 128_256
    max_num_reqs: int = 256
    layers: int = 32
    kv_heads: int = 8
    head_size: int = 128


class StepInputs:
    """A batch of trees and a paged cache."""

    def __init__(self, case: StepCase) -> None:
        self.case = case
        batch, rows, vocab = case.batch, case.rows, case.vocab
        num_rows = batch * rows
        self.tree = load_tree("default").prefix(rows - 1).to(DEVICE)
        self.trees = DeviceTrees.of(self.tree, case.max_num_reqs, DEVICE)
        self.tree_indices = torch.zeros(case.max_num_reqs, dtype=torch.int64, device=DEVICE)
        self.idx_mapping = torch.randperm(case.max_num_reqs, device=DEVICE)[:batch]
        self.expanded_idx_mapping = self.idx_mapping.repeat_interleave(rows)
        self.cu_num_logits = count(batch + 1, torch.int32) * rows
        # Siblings differ, many nodes agree with what is sampled, some are empty.
        base = random_ids(vocab, batch, 1)
        empty = random_ids(16, batch, rows - 1) == 0
        self.drafts = (base + self.tree.ranks[1:]).masked_fill(empty, -1)
        self.sampled = base.repeat_interleave(rows, 0).flatten() + random_ids(2, num_rows)
        self.input_ids = random_ids(vocab, num_rows).to(torch.int32) - 1
        self.logits_indices = count(num_rows)
        self.positions = self.logits_indices.clone()
        self.expanded_local_pos = count(rows, torch.int32).repeat(batch)
        self._make_cache()

    def _make_cache(self) -> None:
        case, place = self.case, CONTEXT + count(self.case.rows)
        blocks = -(-(CONTEXT + case.rows) // BLOCK_SIZE)
        table = torch.randperm(case.batch * blocks, device=DEVICE).view(case.batch, blocks)
        self.slot_mapping = (
            table[:, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
        ).flatten()
        shape = (case.batch * blocks, BLOCK_SIZE, case.kv_heads, 2 * case.head_size)
        kv_caches = [random(*shape).transpose(1, 2) for _ in range(case.layers)]
        self.layers = PagedLayers.make(kv_caches)
        moves = (self.tree.paths > count(self.tree.paths.shape[1])).sum(dim=1)
        row = moves.masked_fill(moves > MOVED_ROWS, 0).argmax()
        self.path = self.tree.paths[row].repeat(case.batch, 1)
        self.moved_rows = int(moves[row])

    @property
    def num_bytes(self) -> dict[str, int]:
        """That a launch reads and writes, each once."""
        case, token = self.case, self.layers.kv_caches[0][0, :, 0]
        return {"compact": 2 * case.batch * self.moved_rows * case.layers * token.nbytes}


def step_calls(inputs: StepInputs, *, kernels: bool) -> dict[str, Call]:
    """The launches of a step in their order, by the kernels or by their torch twins."""
    place = place_tree_rows if kernels else torch_place_tree_rows
    follow = walk if kernels else reference.walk
    compact = compact_path if kernels else torch_compact_path
    logits_indices, starts = inputs.logits_indices, inputs.cu_num_logits
    placed = (inputs.input_ids, inputs.positions, logits_indices, inputs.expanded_local_pos)
    whose = {
        "trees": inputs.trees,
        "idx_mapping": inputs.idx_mapping,
        "expanded_idx_mapping": inputs.expanded_idx_mapping,
        "tree_indices": inputs.tree_indices,
    }
    return {
        "place": partial(place, *placed, **whose),
        "walk": partial(follow, inputs.sampled, inputs.drafts, starts, tree=inputs.tree),
        "compact": partial(
            compact, inputs.layers, inputs.slot_mapping, logits_indices, starts, inputs.path
        ),
    }


def written(inputs: StepInputs, result: Any) -> list[torch.Tensor]:
    """What a launch gave, and all that any of them changes."""
    given = [] if result is None else [result]
    if isinstance(result, WalkResult):
        given = [result.path, result.token_ids, result.lengths]
    changed = (inputs.input_ids, inputs.positions, inputs.tree_indices)
    return [*given, *changed, *inputs.layers.kv_caches]


def check_step(inputs: StepInputs) -> None:
    """Every kernel against its torch twin on a copy, bit for bit."""
    twin = copy.deepcopy(inputs)
    expected = step_calls(twin, kernels=False)
    for name, call in step_calls(inputs, kernels=True).items():
        pair = written(inputs, call()), written(twin, expected[name]())
        if not all(map(torch.equal, *pair)):
            sys.exit(f"wrong: {name}: the kernel's result is not its torch twin's")


def measure_step(case: StepCase, peaks: Peaks) -> dict[str, Any]:
    inputs = StepInputs(case)
    check_step(inputs)
    calls = step_calls(inputs, kernels=True)
    calls["together"] = partial(in_turn, *calls.values())
    twins = step_calls(inputs, kernels=False)
    del twins["compact"]  # it asks the device how much moves, which no graph can hold
    references = {f"{name} reference": call for name, call in twins.items()}
    return {
        **asdict(case),
        "moved_rows": inputs.moved_rows,
        "bytes": inputs.num_bytes,
        "floor_us": {name: peaks.floor_us(size) for name, size in inputs.num_bytes.items()},
        "times": measure(calls | references),
        "host_us": {name: host_us(call) for name, call in calls.items()},
    }
