"""What `compile_kernels` compiles: launches of all of our kernels, in sizes of real models.

A case calls the functions that serving calls, with tensors of the same types and sizes, so that
Triton finds what to compile from what it is given, as it does on a GPU. Contents mean nothing. A
step's kernels get what the GPU benchmarks give them. What has two forms has one on each GPU.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton import JITFunction  # noqa: TID253 - for a script of its own

from tests.kernels.triton.attention_steps import Request, Shape, Step, below_chain
from vllm_recycle.core.adjacency import AdjacencyMatrix
from vllm_recycle.core.copies import Copies
from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.tree import load_tree
from vllm_recycle.core.trunk import CHOICES, ChoiceAcceptance
from vllm_recycle.kernels.triton.attention.tiles import choose_tile
from vllm_recycle.kernels.triton.copies import DeviceCopies
from vllm_recycle.kernels.triton.matrix.fill import fill
from vllm_recycle.kernels.triton.matrix.find import Texts
from vllm_recycle.kernels.triton.matrix.grow import grow
from vllm_recycle.kernels.triton.matrix.seed import seed
from vllm_recycle.kernels.triton.penalties import Penalties, penalise_paths
from vllm_recycle.kernels.triton.top_k import top_k
from vllm_recycle.kernels.triton.trees import DeviceTrees
from vllm_recycle.kernels.triton.trunks import DeviceTrunks, choose_trunks


class Case(NamedTuple):
    """Launches to compile.

    Attributes:
        name: for people and tests.
        launch: makes them.
        archs: the compute capabilities to compile for, times ten.
        resident: programs of the first of them that a multiprocessor is taken to run at a time.

    """

    name: str
    launch: Callable[[], object]
    archs: tuple[int, ...] = (80, 90)
    resident: int = 1


VOCAB = 128_256  # Llama-3's
TREE_ROWS = 81
MAX_NUM_REQS, BATCH, MAX_MODEL_LEN = 8, 2, 64
SINKS = {"sinks": torch.zeros(16, dtype=torch.bfloat16)}
# Rows, heads of a group and head size, what else is given, and the GPUs. The first are Llama-3's,
# Gemma 3's, Qwen2's, Phi-2's and Phi-3's heads.
ATTENTION: list[tuple[tuple[int, int, int], dict[str, Any], tuple[int, ...]]] = [
    ((TREE_ROWS, 4, 128), {}, (80, 90, 100, 120)),
    ((TREE_ROWS, 2, 256), {}, (80, 90)),
    ((TREE_ROWS, 7, 64), {}, (80, 90)),
    ((TREE_ROWS, 1, 80), {}, (90,)),
    ((TREE_ROWS, 1, 96), {}, (80,)),
    # Smaller trees have smaller tiles; the smallest also in contexts too short for shares.
    ((32, 2, 256), {}, (90,)),
    ((16, 4, 128), {}, (80, 90)),
    ((8, 4, 128), {}, (80,)),
    ((8, 4, 128), {"num_splits": 1}, (90,)),
    ((4, 4, 128), {}, (80,)),
    ((4, 4, 128), {"num_splits": 1}, (90,)),
    ((TREE_ROWS, 4, 128), {"block_size": 128}, (90,)),
    ((TREE_ROWS, 4, 128), {"dtype": torch.float16, "num_splits": 1}, (90,)),
    ((TREE_ROWS, 4, 128), {"dtype": torch.float32}, (80,)),
    ((TREE_ROWS, 4, 128), {"own": True}, (80, 90)),
    ((TREE_ROWS, 4, 128), {"window": 20}, (80, 90)),
    ((TREE_ROWS, 2, 256), {"window": 20}, (90,)),
    # GPT-OSS, whose sinks go to the second kernel where there is one.
    ((TREE_ROWS, 8, 64), {"window": 20, "num_splits": 1, **SINKS}, (90,)),
    ((TREE_ROWS, 8, 64), SINKS, (80,)),
]

int32 = partial(torch.zeros, dtype=torch.int32)
int64 = partial(torch.zeros, dtype=torch.int64)


def cases() -> Iterator[Case]:
    for sizes, options, archs in ATTENTION:
        yield from (attention_case(arch, sizes, options) for arch in archs)
    yield from step_cases()
    yield Case("penalise", penalise)
    yield Case("trunks", count_and_take, (80, 90))
    yield Case("copies", find_copies, (80, 90))
    yield Case("trunks-the surer", choose_surer, (80,))
    yield Case("top-k-fp32", lambda: top_k(torch.zeros(3, 32_000), 8), (80,))


def attention_case(arch: int, sizes: tuple[int, int, int], options: dict[str, Any]) -> Case:
    """With two splits, or what else is given."""
    rows, group, head_size = sizes
    given = {"dtype": torch.bfloat16, "block_size": 16, "own": False, "num_splits": 2} | options
    dtype, block_size, own = (given.pop(name) for name in ("dtype", "block_size", "own"))
    tile = choose_tile(rows * group, head_size, itemsize=dtype.itemsize, capability=arch // 10)
    tree, request = load_tree("paper-80").prefix(rows - 1), Request(rows, 40)
    if own:
        tree, request = below_chain(tree, 4), Request(rows + 4, 40, padding=2)
    shape = Shape(head_size, group, 2, block_size, dtype)
    make = partial(Step.make, tree, (request,), shape, own=own)
    name = f"attend {rows} rows, {group} heads of {head_size}, {[*options]}"
    return Case(name, lambda: make().attend(tile=tile, **given), (arch,), tile.resident)


def step_cases() -> Iterator[Case]:
    """The default k and contexts; and the largest, of sequences that share nothing."""
    default = make_step()
    largest = copy.copy(default)
    given = {"contexts": tuple(range(1, 17)), "slots": 1 << 16, "scope": "isolated"}
    largest.matrix = AdjacencyMatrix(VOCAB, 64, **given, max_num_reqs=MAX_NUM_REQS)
    largest.counts, largest.stamps = None, int32(len(largest.matrix.table))
    largest.successors = int32(BATCH * TREE_ROWS, 64)
    for name in ("place", "walk", "compact"):
        yield Case(name, getattr(default, name))
    yield Case("top-k", default.top_k, (90,))
    for name, step, arch in (("default", default, 90), ("largest", largest, 80)):
        yield Case(f"learn-{name}", step.learn, (arch,))
        yield Case(f"seed-{name}", partial(seed, step.matrix, step.stamps, 1, int32(50)), (arch,))
    yield Case("grow", default.grow)
    yield Case("grow-trunk", partial(grow_trees, default, gamma=4), (80,))
    yield Case("grow-rows64", partial(grow_trees, default, rows=64), (100,))
    yield Case("grow-beam32", partial(grow_trees, default, beam=32), (120,))
    for name, arch in (("default", 80), ("paper-80", 90)):
        tree = load_tree(name)
        filled = partial(fill, *drafting(default, tree.num_nodes), tree=tree)
        yield Case(f"fill-{name}", filled, (arch,))


def make_step() -> Any:
    """A step of the GPU benchmarks, of two requests of Llama-3-8B, without the launches before."""
    sys.path.append(str(Path(__file__).parents[3] / "examples" / "gpu"))
    import kernel_timing

    os.environ.pop("TRITON_INTERPRET", None)  # which it has set where there is no GPU
    kernel_timing.DEVICE, kernel_timing.DTYPE = "cpu", torch.bfloat16
    import kernel_step

    # Not all requests teach.
    learns = torch.zeros(BATCH, dtype=torch.bool)
    kernel_step.learn = partial(kernel_step.learn, learns=learns)
    sizes = {"max_num_reqs": MAX_NUM_REQS, "slots": 1 << 16, "text": MAX_MODEL_LEN, "layers": 2}
    with mock.patch.object(JITFunction, "run"):
        step = kernel_step.StepInputs(kernel_step.StepCase(BATCH, TREE_ROWS, **sizes))
    # As vLLM has them.
    step.idx_mapping = step.idx_mapping.int()
    step.expanded_idx_mapping = step.expanded_idx_mapping.int()
    return step


def make_trees(rows: int = TREE_ROWS) -> DeviceTrees:
    return DeviceTrees.empty(rows - 1, MAX_NUM_REQS, depth=rows - 1, device="cpu")


def make_texts() -> Texts:
    return Texts(int32(MAX_NUM_REQS, MAX_MODEL_LEN), int32(MAX_NUM_REQS))


def count_and_take() -> None:
    """Trunks of four tokens, as vLLM's speculators draft them: by place first."""
    trunks = DeviceTrunks.empty(MAX_NUM_REQS, 4, ChoiceAcceptance(int64(MAX_NUM_REQS)))
    shape = (4, MAX_NUM_REQS, CHOICES)
    drafted = (values[:, :BATCH].transpose(0, 1) for values in (int64(*shape), torch.zeros(shape)))
    trunks.count(int32(BATCH), make_texts())
    trunks.take(int32(BATCH), make_texts(), Trunks(*drafted))


def find_copies() -> None:
    copies = Copies(int64(MAX_NUM_REQS), TREE_ROWS - 1)
    DeviceCopies.empty(copies).draft(int32(BATCH), make_texts())


def choose_surer() -> None:
    shapes = (MAX_NUM_REQS, TREE_ROWS - 1, 1), (MAX_NUM_REQS, 4, CHOICES)
    choose_trunks(int32(BATCH), *(Trunks(int64(shape), torch.zeros(shape)) for shape in shapes))


def penalise() -> None:
    """With logits, tokens, places in their trees and requests of some rows."""
    rows, parents = (torch.zeros(3, VOCAB), int64(3), int32(3), int32(3)), make_trees().parents
    of_requests = (torch.zeros(MAX_NUM_REQS) for _ in range(3))
    counts = int32(MAX_NUM_REQS, -(-VOCAB // 32)), int32(MAX_NUM_REQS, VOCAB)
    penalise_paths(*rows, parents=parents, penalties=Penalties(*of_requests, *counts))


def drafting(step: Any, num_nodes: int) -> tuple:
    """What `grow` and `fill` begin with."""
    drafts, worths = int64(BATCH, num_nodes), torch.zeros(BATCH, num_nodes)
    return drafts, worths, step.matrix, step.counts.rates, step.idx_mapping, step.texts


def grow_trees(step: Any, *, rows: int = TREE_ROWS, beam: int = 16, gamma: int = 0) -> None:
    shape = (MAX_NUM_REQS, gamma, CHOICES)
    trunks = Trunks(int64(shape), torch.zeros(shape)) if gamma else None
    grow(*drafting(step, rows - 1), trees=make_trees(rows), beam=beam, trunks=trunks)
