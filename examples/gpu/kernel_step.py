"""The small kernels of a step for `kernels.py`: inputs, launches in order, and whether they agree.

They place the rows of trees, update the matrix, walk the trees, compact the KV and fill new trees.
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

from vllm_recycle.core import REFERENCE, TemplateMatrix, WalkResult, load_tree
from vllm_recycle.kernels.triton.inputs import place_tree_rows
from vllm_recycle.kernels.triton.kv_cache import compact_path
from vllm_recycle.kernels.triton.operations import OPERATIONS
from vllm_recycle.kernels.triton.paged_layers import PagedLayers

CONTEXT = 5  # before the rows, so that they do not begin with a block
MOVED_ROWS = 4  # at most, of a path


@dataclass(frozen=True, slots=True)
class StepCase:
    batch: int
    rows: int  # of a request
    vocab: int = 128_256
    k: int = 8
    max_num_reqs: int = 256
    layers: int = 32
    kv_heads: int = 8
    head_size: int = 128


class StepInputs:
    """A batch of trees in a matrix that is well filled, a paged cache, and a vocabulary's logits.

    Successors are random, and so are the tokens whose rows are written: nearly all differ, which
    is the most work.
    """

    def __init__(self, case: StepCase) -> None:
        self.case = case
        batch, rows, vocab = case.batch, case.rows, case.vocab
        num_rows = batch * rows
        self.tree = load_tree("default").prefix(rows - 1).to(DEVICE)
        self.matrix = TemplateMatrix(
            vocab, case.k, scope="sequence", max_num_reqs=case.max_num_reqs, device=DEVICE
        )
        learned = 2 * vocab  # which fills seven of eight rows
        sequences, tokens = random_ids(case.max_num_reqs, learned), random_ids(vocab, learned)
        self.matrix.update(sequences, tokens, random_ids(vocab, learned, case.k))
        self.idx_mapping = torch.randperm(case.max_num_reqs, device=DEVICE)[:batch]
        self.expanded_idx_mapping = self.idx_mapping.repeat_interleave(rows)
        self.cu_num_logits = count(batch + 1, torch.int32) * rows
        self.last_token_ids = random_ids(vocab, batch)
        self.token_ids = random_ids(vocab, num_rows)
        self.logits = random(num_rows, vocab)
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
        """That two of the launches read and write, each once."""
        case, row, token = self.case, self.matrix.table[0], self.layers.kv_caches[0][0, :, 0]
        return {
            # Each row is written to an overlay and to the shared matrix.
            "update": self.logits.nbytes + 2 * len(self.token_ids) * row.nbytes,
            "compact": 2 * case.batch * self.moved_rows * case.layers * token.nbytes,
        }


def step_calls(inputs: StepInputs, *, kernels: bool) -> dict[str, Call]:
    """The launches of a step in their order, by the kernels or by their torch twins."""
    operations = OPERATIONS if kernels else REFERENCE
    place = place_tree_rows if kernels else torch_place_tree_rows
    compact = compact_path if kernels else torch_compact_path
    table, layout, tree = inputs.matrix.table, inputs.matrix.layout, inputs.tree
    ids, logits_indices, starts = inputs.token_ids, inputs.logits_indices, inputs.cu_num_logits
    placed = (inputs.input_ids, inputs.positions, logits_indices, inputs.expanded_local_pos)
    learned = (table, inputs.expanded_idx_mapping, ids, inputs.logits)
    drafted = (table, inputs.idx_mapping, inputs.last_token_ids)
    return {
        "place": partial(place, *placed, tree=tree),
        "update": partial(operations.update_from_logits, *learned, layout=layout),
        "walk": partial(operations.walk, inputs.sampled, inputs.drafts, starts, tree=tree),
        "compact": partial(
            compact, inputs.layers, inputs.slot_mapping, logits_indices, starts, inputs.path
        ),
        "fill": partial(operations.fill_tree, *drafted, tree=tree, layout=layout),
    }


def written(inputs: StepInputs, result: Any) -> list[torch.Tensor]:
    """What a launch gave, and all that any of them changes."""
    given = [] if result is None else [result]
    if isinstance(result, WalkResult):
        given = [result.path, result.token_ids, result.lengths]
    inputs.matrix.table[inputs.matrix.layout.dump_address] = 0  # nobody reads it
    changed = (inputs.input_ids, inputs.positions, inputs.matrix.table)
    return [*given, *changed, *inputs.layers.kv_caches]


def check_step(inputs: StepInputs) -> None:
    """Every kernel against its torch twin on a copy, bit for bit."""
    twin = copy.deepcopy(inputs)
    expected = step_calls(twin, kernels=False)
    expected["update"] = partial(update_in_order, twin)
    for name, call in step_calls(inputs, kernels=True).items():
        pair = written(inputs, call()), written(twin, expected[name]())
        if not all(map(torch.equal, *pair)):
            sys.exit(f"wrong: {name}: the kernel's result is not its torch twin's")


def update_in_order(inputs: StepInputs) -> None:
    """Of equal logits the kernel takes the lower token first, torch's top-k any."""
    successors = [
        logits.sort(dim=1, descending=True, stable=True).indices[:, : inputs.case.k]
        for logits in inputs.logits.split(inputs.case.rows)
    ]
    inputs.matrix.update(inputs.expanded_idx_mapping, inputs.token_ids, torch.cat(successors))


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
