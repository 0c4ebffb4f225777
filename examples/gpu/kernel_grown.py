"""The kernels that grow trees and learn context rows, for `kernels.py`: inputs and agreement."""

from __future__ import annotations

import copy
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch_twins_dynamic
from kernel_timing import DEVICE, Call, Peaks, count, host_us, in_turn, measure, random, random_ids

from vllm_recycle.core.acceptance import AcceptanceTable
from vllm_recycle.core.adjacency import AdjacencyMatrix
from vllm_recycle.core.beam import BEAM, LEVELS
from vllm_recycle.core.beam import grow_by_levels as torch_grow_by_levels
from vllm_recycle.kernels.triton.matrix.count import DeviceCounts
from vllm_recycle.kernels.triton.matrix.grow import grow_by_levels
from vllm_recycle.kernels.triton.matrix.learn import learn
from vllm_recycle.kernels.triton.matrix.seed import seed
from vllm_recycle.kernels.triton.operations import OPERATIONS
from vllm_recycle.kernels.triton.text_tails import read_tails
from vllm_recycle.kernels.triton.top_k import top_k
from vllm_recycle.kernels.triton.trees import DeviceTrees, ancestor_bits

CONTEXTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class GrownCase:
    batch: int
    rows: int  # of a request
    vocab: int = 128_256
    k: int = 8
    max_num_reqs: int = 256
    slots: int = 1 << 20
    text: int = 2048  # tokens of a request
    words: int = 256  # different ones of its text, so that contexts come again


class GrownInputs:
    """Requests whose texts have seeded a table, and a step in which all that can be is accepted."""

    def __init__(self, case: GrownCase) -> None:
        self.case, batch, vocab = case, case.batch, case.vocab
        self.rows = AdjacencyMatrix(
            vocab,
            case.k,
            contexts=CONTEXTS,
            slots=case.slots,
            max_num_reqs=case.max_num_reqs,
            device=DEVICE,
        )
        self.texts = random_ids(case.words, case.max_num_reqs, case.text).to(torch.int32)
        self.idx_mapping = torch.randperm(case.max_num_reqs, device=DEVICE)[:batch]
        self.total_len = torch.full((case.max_num_reqs,), case.text, device=DEVICE)
        self.stamps = torch.zeros(len(self.rows.table), dtype=torch.int32, device=DEVICE)
        self.counts = DeviceCounts.of(AcceptanceTable(self.rows.layout, device=DEVICE))
        for req_state_idx in self.idx_mapping.tolist():
            self.rows.begin(req_state_idx)
        seed(
            self.rows.table,
            self.stamps,
            self.texts,
            layout=self.rows.layout,
            salts=self.rows.salts,
            req_state_indices=self.idx_mapping.tolist(),
            lengths=[case.text] * batch,
        )
        nodes = case.rows - 1
        depth = min(LEVELS, nodes)
        self.trees = DeviceTrees.make(case.max_num_reqs, nodes, depth=depth, device=DEVICE)
        self.drafts = torch.empty(batch, nodes, dtype=torch.int64, device=DEVICE)
        self.worth = torch.empty(batch, nodes, device=DEVICE)
        self.max_depths = torch.full((batch,), depth, dtype=torch.int32, device=DEVICE)
        self.tails = self.read_tails()
        self.grow()
        self.cu_num_logits = count(batch + 1) * case.rows
        root = self.tails[:, :1]
        self.row_token_ids = torch.cat((root, self.drafts), dim=1).flatten()
        # What is sampled at a row is the first of its children that was drafted.
        sampled = random_ids(vocab, batch, case.rows)
        parents = self.trees.parents[self.idx_mapping, 1:].long()
        self.sampled = sampled.scatter_(1, parents.flip(1), self.drafts.flip(1)).flatten()
        self.logits = random(batch * case.rows, vocab)
        self.successors = top_k(self.logits, case.k)
        self.walked = self.walk()

    def read_tails(self) -> torch.Tensor:
        reach = self.rows.layout.reach
        return read_tails(self.texts, self.idx_mapping, self.total_len, reach=reach)

    def grow(self) -> None:
        grow_by_levels(
            self.drafts,
            self.worth,
            self.rows.table,
            self.counts.rates,
            self.idx_mapping,
            layout=self.rows.layout,
            salts=self.rows.salts,
            tails=self.tails,
            max_depths=self.max_depths,
            trees=self.trees,
            beam=BEAM,
        )

    def walk(self) -> Any:
        return OPERATIONS.walk(
            self.sampled,
            self.drafts,
            self.cu_num_logits,
            tree=self.trees,
            idx_mapping=self.idx_mapping,
        )

    def learn(self, function: Call = learn) -> None:
        function(
            self.rows.table,
            self.stamps,
            self.counts,
            layout=self.rows.layout,
            idx_mapping=self.idx_mapping,
            salts=self.rows.salts,
            tails=self.tails,
            parents=self.trees.parents,
            row_token_ids=self.row_token_ids,
            cu_num_logits=self.cu_num_logits,
            successors=self.successors,
            walked=self.walked,
            max_rows=self.case.rows,
        )


def check_grown(inputs: GrownInputs) -> None:
    """Growing and learning against their references, bit for bit."""
    idx_mapping, rows = inputs.idx_mapping, inputs.rows
    growth, worth = torch_grow_by_levels(
        rows.table.cpu(),
        inputs.counts.rates.cpu(),
        layout=rows.layout,
        salts=rows.salts[idx_mapping].cpu(),
        tails=inputs.tails.cpu(),
        max_depths=inputs.max_depths.cpu(),
        max_nodes=inputs.trees.num_nodes,
        beam=BEAM,
        levels=inputs.trees.depth,
    )
    pairs = (
        (inputs.drafts, growth.token_ids),
        (inputs.worth, worth),
        (inputs.trees.parents[idx_mapping], growth.trees.parents.int()),
        (inputs.trees.ancestor_bits[idx_mapping], ancestor_bits(growth.trees.ancestor_mask)),
    )
    if not all(one.cpu().equal(other) for one, other in pairs):
        sys.exit("wrong: grow: the kernel's trees are not those of its reference")
    twin = copy.deepcopy(inputs)
    inputs.learn()
    twin.learn(torch_twins_dynamic.learn)
    if not inputs.rows.table.equal(twin.rows.table):
        sys.exit("wrong: learn: the kernel's rows are not those of its reference")
    if not inputs.counts.counts.equal(twin.counts.counts):
        sys.exit("wrong: learn: the kernel's counts are not those of its reference")


def measure_grown(case: GrownCase, peaks: Peaks) -> dict[str, Any]:
    inputs = GrownInputs(case)
    check_grown(inputs)
    calls: dict[str, Call] = {
        "tails": inputs.read_tails,
        "top_k": partial(top_k, inputs.logits, case.k),
        "walk": inputs.walk,
        "learn": inputs.learn,
        "grow": inputs.grow,
    }
    calls["together"] = partial(in_turn, *calls.values())
    return {
        **asdict(case),
        "nodes": int((inputs.drafts >= 0).sum()),
        "accepted": int(inputs.walked.lengths.sum()) - case.batch,
        "floor_us": {"top_k": peaks.floor_us(inputs.logits.nbytes)},
        "times": measure(calls),
        "host_us": {name: host_us(call) for name, call in calls.items()},
    }
