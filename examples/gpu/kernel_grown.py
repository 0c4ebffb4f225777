"""The kernels that draft from the adjacency matrix and teach it, for `kernels.py`."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from kernel_timing import DEVICE, Call, Peaks, count, host_us, in_turn, measure, random, random_ids

from vllm_recycle.core import WalkResult, reference
from vllm_recycle.core.acceptance import AcceptanceTable
from vllm_recycle.core.adjacency import AdjacencyMatrix
from vllm_recycle.core.grow import BEAM, LEVELS, Growth
from vllm_recycle.core.tree import TreeTemplate, load_tree
from vllm_recycle.kernels.triton.matrix.count import DeviceCounts
from vllm_recycle.kernels.triton.matrix.fill import fill
from vllm_recycle.kernels.triton.matrix.find import Texts
from vllm_recycle.kernels.triton.matrix.grow import grow
from vllm_recycle.kernels.triton.matrix.learn import learn
from vllm_recycle.kernels.triton.matrix.seed import seed
from vllm_recycle.kernels.triton.top_k import top_k
from vllm_recycle.kernels.triton.trees import DeviceTrees, ancestor_bits
from vllm_recycle.kernels.triton.walk import walk_trees

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
        self.matrix = AdjacencyMatrix(
            vocab,
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
        self.stamps = torch.zeros(len(self.matrix.table), dtype=torch.int32, device=DEVICE)
        self.counts = DeviceCounts.of(AcceptanceTable(self.matrix.layout, device=DEVICE))
        for req_state_idx in self.idx_mapping.tolist():
            self.matrix.begin(req_state_idx)
        seed(
            self.matrix.table,
            self.stamps,
            token_ids,
            layout=self.matrix.layout,
            salts=self.matrix.salts,
            req_state_indices=self.idx_mapping.tolist(),
            lengths=[case.text] * batch,
        )
        nodes = case.rows - 1
        depth = min(LEVELS, nodes)
        self.trees = DeviceTrees.empty(nodes, case.max_num_reqs, depth=depth, device=DEVICE)
        self.template: TreeTemplate = load_tree("default").prefix(nodes).to(DEVICE)
        self.drafts, self.filled = (
            torch.empty(batch, tree.num_nodes, dtype=torch.int64, device=DEVICE)
            for tree in (self.trees, self.template)
        )
        self.worths, self.filled_worths = (
            torch.empty(drafts.shape, device=DEVICE) for drafts in (self.drafts, self.filled)
        )
        self.grow()
        self.fill()
        # By request, as the walk reads them.
        self.draft_tokens = torch.full((case.max_num_reqs, nodes), -1, device=DEVICE)
        self.draft_tokens[self.idx_mapping] = self.drafts
        self.cu_num_logits = count(batch + 1) * case.rows
        root = token_ids[self.idx_mapping, -1:]
        self.row_token_ids = torch.cat((root, self.drafts), dim=1).flatten()
        # What is sampled at a row is the first of its children that was drafted.
        sampled = random_ids(vocab, batch, case.rows)
        parents = self.trees.parents[self.idx_mapping, 1:].long()
        self.sampled = sampled.scatter_(1, parents.flip(1), self.drafts.flip(1)).flatten()
        self.logits = random(batch * case.rows, vocab)
        self.successors = top_k(self.logits, case.k)
        self.walked = self.walk()

    @property
    def given(self) -> dict[str, Any]:
        return {
            "layout": self.matrix.layout,
            "salts": self.matrix.salts,
            "texts": self.texts,
        }

    @property
    def learnt(self) -> tuple[torch.Tensor, ...]:
        return self.matrix.table, self.counts.rates, self.idx_mapping

    def grow(self) -> None:
        grow(self.drafts, self.worths, *self.learnt, **self.given, trees=self.trees, beam=BEAM)

    def fill(self) -> None:
        fill(self.filled, self.filled_worths, *self.learnt, **self.given, tree=self.template)

    def walk(self) -> Any:
        return walk_trees(
            self.sampled,
            self.draft_tokens,
            self.cu_num_logits,
            trees=self.trees,
            idx_mapping=self.idx_mapping,
        )

    def learn(self) -> None:
        learn(
            self.matrix.table,
            self.stamps,
            self.counts,
            **self.given,
            idx_mapping=self.idx_mapping,
            parents=self.trees.parents,
            row_token_ids=self.row_token_ids,
            cu_num_logits=self.cu_num_logits,
            successors=self.successors,
            walked=self.walked,
            max_rows=self.case.rows,
        )


def check_grown(inputs: GrownInputs) -> None:
    """Drafting and learning against the core, bit for bit."""
    idx_mapping, matrix, trees = inputs.idx_mapping, inputs.matrix, inputs.trees
    reach = matrix.layout.reach
    given = {
        "layout": matrix.layout,
        "salts": matrix.salts[idx_mapping].cpu(),
        "tails": inputs.texts.token_ids[idx_mapping].flip(1)[:, :reach].long().cpu(),
    }
    learnt = (matrix.table.cpu(), inputs.counts.rates.cpu())
    depths = torch.full((len(idx_mapping),), trees.depth)
    grown = reference.grow(
        *learnt,
        **given,
        max_depths=depths,
        max_nodes=trees.num_nodes,
        beam=BEAM,
        levels=trees.depth,
    )
    template = inputs.template.to("cpu")
    filled = reference.fill(*learnt, **given, max_depths=depths + template.depth, tree=template)
    _compare("grow", inputs.drafts, inputs.worths, grown)
    _compare("fill", inputs.filled, inputs.filled_worths, filled)
    pairs = (
        (trees.parents[idx_mapping], grown.trees.parents.int()),
        (trees.ancestor_bits[idx_mapping], ancestor_bits(grown.trees.ancestor_mask)),
    )
    if not all(one.cpu().equal(other) for one, other in pairs):
        sys.exit("wrong: grow: the kernel's trees are not those of the core")
    table, counts = matrix.table.cpu().clone(), inputs.counts.counts.cpu().clone()
    walked = inputs.walked
    reference.learn(
        table,
        counts,
        **given,
        parents=trees.parents[idx_mapping].long().cpu(),
        row_token_ids=inputs.row_token_ids.cpu(),
        cu_num_logits=inputs.cu_num_logits.cpu(),
        successors=inputs.successors.cpu(),
        walked=WalkResult(*(getattr(walked, name).cpu() for name in walked.__slots__)),
    )
    inputs.learn()
    if not matrix.table.cpu().equal(table):
        sys.exit("wrong: learn: the kernel's entries are not those of the core")
    if not inputs.counts.counts.cpu().equal(counts):
        sys.exit("wrong: learn: the kernel's counts are not those of the core")


def _compare(name: str, drafts: torch.Tensor, worths: torch.Tensor, growth: Growth) -> None:
    if not (drafts.cpu().equal(growth.token_ids) and worths.cpu().equal(growth.worths)):
        sys.exit(f"wrong: {name}: the kernel's drafts are not those of the core")


def measure_grown(case: GrownCase, peaks: Peaks) -> dict[str, Any]:
    inputs = GrownInputs(case)
    check_grown(inputs)
    calls: dict[str, Call] = {
        "top_k": partial(top_k, inputs.logits, case.k),
        "walk": inputs.walk,
        "learn": inputs.learn,
        "grow": inputs.grow,
        "fill": inputs.fill,
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
