"""The small kernels of a step for `kernels.py`: inputs, launches in order, and whether they agree.

They place the rows of trees, take the top-k, walk the trees, compact the KV, learn and grow.
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

from tests.kernels.triton.torch_twins import compact_path as torch_compact_path
from tests.kernels.triton.torch_twins import place_tree_rows as torch_place_tree_rows
from vllm_recycle.core import reference
from vllm_recycle.core.acceptance import AcceptanceTable
from vllm_recycle.core.adjacency import AdjacencyMatrix, Ends
from vllm_recycle.core.grow import BEAM, LEVELS, TextEnds
from vllm_recycle.core.grow import grow as core_grow
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.tree import Trees
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.kernels.triton.inputs import place_tree_rows
from vllm_recycle.kernels.triton.kv_cache import compact_path
from vllm_recycle.kernels.triton.matrix.count import DeviceCounts
from vllm_recycle.kernels.triton.matrix.find import Texts
from vllm_recycle.kernels.triton.matrix.grow import grow
from vllm_recycle.kernels.triton.matrix.learn import learn
from vllm_recycle.kernels.triton.matrix.seed import seed
from vllm_recycle.kernels.triton.paged_layers import PagedLayers
from vllm_recycle.kernels.triton.top_k import top_k
from vllm_recycle.kernels.triton.trees import DeviceTrees, ancestor_bits
from vllm_recycle.kernels.triton.walk import walk

CONTEXTS = (1, 2, 4, 16)
MORE_WARPS = (2, 4)  # than growing has by default
BEFORE_ROWS = 5  # tokens, so that the rows do not begin with a block


@dataclass(frozen=True, slots=True)
class StepCase:
    batch: int
    rows: int  # per request
    vocab: int = 128_256
    k: int = 8
    max_num_reqs: int = 256
    slots: int = 1 << 20
    text: int = 2048  # tokens per request
    words: int = 256  # different ones of its text, so that contexts come again
    layers: int = 32
    kv_heads: int = 8
    head_size: int = 128


class StepInputs:
    """Requests whose texts have seeded a table, and a step in which all that can be is accepted."""

    def __init__(self, case: StepCase) -> None:
        self.case, batch, rows = case, case.batch, case.rows
        self.matrix = AdjacencyMatrix(
            case.vocab,
            case.k,
            contexts=CONTEXTS,
            slots=case.slots,
            max_num_reqs=case.max_num_reqs,
            device=DEVICE,
        )
        token_ids = random_ids(case.words, case.max_num_reqs, case.text).to(torch.int32)
        lengths = torch.full((case.max_num_reqs,), case.text, dtype=torch.int32, device=DEVICE)
        self.texts = Texts(token_ids, lengths)
        self.idx_mapping = torch.randperm(case.max_num_reqs, device=DEVICE)[:batch]
        self.expanded_idx_mapping = self.idx_mapping.repeat_interleave(rows)
        self.stamps = torch.zeros(len(self.matrix.table), dtype=torch.int32, device=DEVICE)
        self.counts = DeviceCounts.of(AcceptanceTable(self.matrix.layout, device=DEVICE))
        for req_state_idx in self.idx_mapping.tolist():
            self.matrix.begin(req_state_idx)
            text = token_ids[req_state_idx]
            self.seed = partial(seed, self.matrix, self.stamps, req_state_idx, text)
            self.seed()
        nodes = rows - 1
        depth = min(LEVELS, nodes)
        self.trees = DeviceTrees.empty(nodes, case.max_num_reqs, depth=depth, device=DEVICE)
        self.grown = torch.empty(batch, nodes, dtype=torch.int64, device=DEVICE)
        self.worths = torch.empty(batch, nodes, device=DEVICE)
        self.grow()
        # By `req_state_idx`, as vLLM keeps drafts.
        self.drafts = torch.full((case.max_num_reqs, nodes), -1, device=DEVICE)
        self.drafts[self.idx_mapping] = self.grown
        roots = token_ids[self.idx_mapping, -1:]
        self.cu_num_logits = count(batch + 1, torch.int32) * rows
        self.row_token_ids = torch.cat((roots, self.grown), dim=1).flatten()
        self.input_ids = self.row_token_ids.to(torch.int32)
        self.logits_indices = count(batch * rows)
        self.positions = self.logits_indices.clone()
        self.expanded_local_pos = count(rows, torch.int32).repeat(batch)
        self.tree_indices = torch.zeros(case.max_num_reqs, dtype=torch.int64, device=DEVICE)
        # What is sampled at a row is the first of its children that was drafted.
        sampled = random_ids(case.vocab, batch, rows)
        parents = self.trees.parents[self.idx_mapping, 1:].long()
        drafted = sampled.scatter(1, parents.flip(1), self.grown.flip(1))
        self.sampled = drafted.where(drafted >= 0, sampled).flatten()
        self.logits = random(batch * rows, case.vocab)
        self.successors = top_k(self.logits, case.k)
        self.walked = self.walk()
        self._make_cache()

    def _make_cache(self) -> None:
        case, place = self.case, BEFORE_ROWS + count(self.case.rows)
        blocks = -(-(BEFORE_ROWS + case.rows) // BLOCK_SIZE)
        table = torch.randperm(case.batch * blocks, device=DEVICE).view(case.batch, blocks)
        self.slot_mapping = (
            table[:, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
        ).flatten()
        shape = (case.batch * blocks, BLOCK_SIZE, case.kv_heads, 2 * case.head_size)
        kv_caches = [random(*shape).transpose(1, 2) for _ in range(case.layers)]
        self.layers = PagedLayers.make(kv_caches)

    @property
    def moved_rows(self) -> int:
        path = self.walked.path
        return int((path > count(path.shape[1])).sum())

    @property
    def num_bytes(self) -> dict[str, int]:
        """That two of the launches read and write, each once."""
        token = self.layers.kv_caches[0][0, :, 0].nbytes
        moved = 2 * self.moved_rows * self.case.layers * token
        return {"top_k": self.logits.nbytes, "compact": moved}

    def place(self, function: Call = place_tree_rows) -> torch.Tensor:
        return function(
            self.input_ids,
            self.positions,
            self.logits_indices,
            self.expanded_local_pos,
            trees=self.trees,
            idx_mapping=self.idx_mapping,
            expanded_idx_mapping=self.expanded_idx_mapping,
            tree_indices=self.tree_indices,
        )

    def top_k(self) -> torch.Tensor:
        return top_k(self.logits, self.case.k)

    def walk(self) -> WalkResult:
        return walk(
            self.sampled,
            self.drafts,
            self.cu_num_logits,
            trees=self.trees,
            idx_mapping=self.idx_mapping,
        )

    def compact(self, function: Call = compact_path) -> None:
        rows = (self.slot_mapping, self.logits_indices, self.cu_num_logits)
        function(self.layers, *rows, self.walked.path)

    def learn(self) -> None:
        step = VerifiedStep(
            idx_mapping=self.idx_mapping,
            parents=self.trees.parents,
            row_token_ids=self.row_token_ids,
            cu_num_logits=self.cu_num_logits,
            successors=self.successors,
            walked=self.walked,
        )
        matrix, rows = self.matrix, self.case.rows
        learn(matrix, self.stamps, self.counts, self.texts, step, max_rows=rows)

    def grow(self, num_warps: int | None = None) -> None:
        grow(
            self.grown,
            self.worths,
            self.matrix,
            self.counts.rates,
            self.idx_mapping,
            self.texts,
            trees=self.trees,
            beam=BEAM,
            num_warps=num_warps,
        )


def check_step(inputs: StepInputs) -> None:
    """Every kernel against its reference, bit for bit; `inputs` is as after a step."""
    twin, idx_mapping = copy.deepcopy(inputs), inputs.idx_mapping.cpu()
    matrix = copy.copy(inputs.matrix)
    matrix.table = matrix.table.cpu().clone()
    matrix.salts, matrix.classes = matrix.salts.cpu(), matrix.classes.cpu()
    last = [inputs.case.text - 1] * len(idx_mapping)
    ends = Ends(inputs.texts.token_ids.cpu()[idx_mapping], last)
    growth = core_grow(
        matrix,
        inputs.counts.rates.cpu(),
        TextEnds(idx_mapping, ends, [inputs.trees.depth] * len(last)),
        max_nodes=inputs.trees.num_nodes,
        beam=BEAM,
        levels=inputs.trees.depth,
    )
    compare("grow", inputs.grown, growth.token_ids)
    compare("grow", inputs.worths, growth.worths)
    compare("grow", inputs.trees.parents[idx_mapping], growth.parents.int())
    bits = ancestor_bits(Trees.from_parents(growth.parents).ancestor_mask)
    compare("grow", inputs.trees.ancestor_bits[idx_mapping], bits)
    for warps in MORE_WARPS:
        inputs.grow(warps)
        compare(f"grow-{warps}", inputs.grown, growth.token_ids)
        compare(f"grow-{warps}", inputs.trees.parents[idx_mapping], growth.parents.int())

    compare("place", inputs.place(), StepInputs.place(twin, torch_place_tree_rows))
    for name in ("input_ids", "positions", "tree_indices"):
        compare("place", getattr(inputs, name), getattr(twin, name))
    compare("top_k", inputs.top_k(), reference.top_k(inputs.logits.cpu(), inputs.case.k)[0])

    starts, walked = inputs.cu_num_logits.cpu(), inputs.walk()
    parents = inputs.trees.parents.cpu()[idx_mapping].long()
    trees, drafts = Trees.from_parents(parents), inputs.drafts.cpu()[idx_mapping]
    expected = reference.walk(inputs.sampled.cpu(), drafts, starts, trees=trees)
    depth = expected.path.shape[1]  # that of these trees, which is less than there is room for
    compare("walk", walked.path[:, :depth], expected.path)
    compare("walk", walked.token_ids[:, :depth], expected.token_ids)
    compare("walk", walked.lengths, expected.lengths)

    inputs.compact()
    StepInputs.compact(twin, torch_compact_path)
    for one, other in zip(inputs.layers.kv_caches, twin.layers.kv_caches, strict=True):
        compare("compact", one, other)

    counts = inputs.counts.counts.cpu().clone()
    step = VerifiedStep(
        idx_mapping=idx_mapping,
        parents=parents,
        row_token_ids=inputs.row_token_ids.cpu(),
        cu_num_logits=starts,
        successors=inputs.successors.cpu(),
        walked=expected,
    )
    reference.learn(matrix, counts, ends, step)
    inputs.learn()
    compare("learn", inputs.matrix.table, matrix.table)
    compare("learn", inputs.counts.counts, counts)


def compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if not found.cpu().equal(expected.cpu()):
        sys.exit(f"wrong: {name}: the kernel's result is not that of its reference")


def measure_step(case: StepCase, peaks: Peaks) -> dict[str, Any]:
    inputs = StepInputs(case)
    check_step(inputs)
    names = ("place", "top_k", "walk", "compact", "learn", "grow")
    calls: dict[str, Call] = {name: getattr(inputs, name) for name in names}
    calls["together"] = partial(in_turn, *calls.values())
    calls |= {f"grow-{warps}": partial(inputs.grow, warps) for warps in MORE_WARPS}
    calls["seed"] = inputs.seed  # of one prompt, in no step
    return {
        **asdict(case),
        "nodes": int((inputs.grown >= 0).sum()),
        "accepted": int(inputs.walked.lengths.sum()) - case.batch,
        "moved_rows": inputs.moved_rows,
        "bytes": inputs.num_bytes,
        "floor_us": {name: peaks.floor_us(size) for name, size in inputs.num_bytes.items()},
        "times": measure(calls),
        "host_us": {name: host_us(call) for name, call in calls.items()},
    }
