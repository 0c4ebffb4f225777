"""What `compile_kernels` compiles: launches of all of our kernels, in sizes of real models.

A case calls the functions that serving calls, with tensors of the same types and sizes, so that
Triton finds what to compile from what it is given, as it does on a GPU. Contents mean nothing. A
step's kernels get what the GPU benchmarks give them.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.kernels.triton import fake_gpu
from tests.kernels.triton.attention_steps import Request, Shape, Step, below_chain
from vllm_recycle.core.adjacency import AdjacencyMatrix
from vllm_recycle.core.draft_shape import DraftShape
from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.tree import load_tree
from vllm_recycle.core.trunk import CHOICES, ChoiceAcceptance
from vllm_recycle.kernels.triton.accepted_rows import move_rows
from vllm_recycle.kernels.triton.attention.tiles import choose_tile
from vllm_recycle.kernels.triton.matrix.fill import fill
from vllm_recycle.kernels.triton.matrix.find import Texts
from vllm_recycle.kernels.triton.matrix.grow import grow
from vllm_recycle.kernels.triton.matrix.seed import seed
from vllm_recycle.kernels.triton.ouroboros.harvest import harvest
from vllm_recycle.kernels.triton.ouroboros.phrase_pool import insert_phrases, newest_phrases
from vllm_recycle.kernels.triton.ouroboros.round_starts import RoundStart, begin_round
from vllm_recycle.kernels.triton.penalties import BadWords, Penalties, ban_words, penalise_paths
from vllm_recycle.kernels.triton.top_k import top_k
from vllm_recycle.kernels.triton.trees import DeviceTrees
from vllm_recycle.kernels.triton.trunks import DeviceTrunks


@dataclass(frozen=True)
class Case:
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
# Heads of a group and head size: Llama-3, Gemma 3, Phi-2, Phi-3, Qwen2.
HEADS = [(4, 128), (2, 256), (1, 80), (1, 96), (7, 64)]

int32 = partial(torch.zeros, dtype=torch.int32)
int64 = partial(torch.zeros, dtype=torch.int64)


def cases() -> Iterator[Case]:
    yield from attention_cases()
    yield from step_cases()
    yield Case("penalise", penalise)
    yield Case("ban", ban)
    for dtype, width in ((torch.int32, ()), (torch.int64, ()), (torch.bfloat16, (4096,))):
        yield Case(f"move-{str(dtype).removeprefix('torch.')}", partial(move, dtype, *width))
    for name, has_probabilities in (("a head", True), ("ngram", False)):
        yield Case(f"trunks-{name}", partial(count_and_take, has_probabilities))
    yield Case("top-k-fp32", lambda: top_k(torch.zeros(3, 32_000), 8))
    yield from ouroboros_cases()


def attention_cases() -> Iterator[Case]:
    for arch in (80, 90):
        case = partial(attention_case, arch)
        for group, head_size in HEADS:
            yield case(TREE_ROWS, group, head_size)
        # Smaller trees have smaller tiles; the first of these is the largest by default.
        for rows in (64, 16, 8, 4):
            yield case(rows, 4, 128)
        yield case(32, 2, 256)
        yield case(TREE_ROWS, 4, 128, block_size=128)
        yield case(TREE_ROWS, 4, 128, torch.float16, num_splits=1)
        # The smallest tiles, in contexts that are too short for shares.
        for rows in (8, 4):
            yield case(rows, 4, 128, num_splits=1)
        yield case(TREE_ROWS, 4, 128, torch.float32)
        yield case(TREE_ROWS, 4, 128, own=True)
        yield case(TREE_ROWS, 4, 128, window=20)
        yield case(TREE_ROWS, 2, 256, window=20)
        # GPT-OSS, whose sinks go to the second kernel where there is one.
        sinks = torch.zeros(16, dtype=torch.bfloat16)
        yield case(TREE_ROWS, 8, 64, window=20, num_splits=1, sinks=sinks)
        yield case(TREE_ROWS, 8, 64, sinks=sinks)
    for arch in (100, 120):
        yield attention_case(arch, TREE_ROWS, 4, 128)


def attention_case(
    arch: int,
    rows: int,
    group: int,
    head_size: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    block_size: int = 16,
    own: bool = False,
    **given: Any,
) -> Case:
    """With two splits, or what else is given."""
    tile = choose_tile(rows * group, head_size, itemsize=dtype.itemsize, capability=arch // 10)

    def launch() -> None:
        shape = Shape(head_size, group, 2, block_size, dtype)
        tree = load_tree("paper-80").prefix(rows - 1)
        requests = (Request(rows, 40),)
        if own:
            tree, requests = below_chain(tree, 4), (Request(rows + 4, 40, padding=2),)
        step = Step.make(tree, requests, shape, own=own)
        step.attend(**{"tile": tile, "num_splits": 2, **given})

    sizes = f"{dtype}-rows{rows}-group{group}-head{head_size}-block{block_size}"
    name = "-".join(("attend", sizes.removeprefix("torch."), *["own"] * own, *given))
    return Case(name, launch, (arch,), tile.resident)


def step_cases() -> Iterator[Case]:
    """The default k and contexts; and the largest, of sequences that share nothing."""
    default = make_step()
    largest = copy.copy(default)
    given = {"contexts": tuple(range(1, 17)), "slots": 1 << 16, "scope": "isolated"}
    largest.matrix = AdjacencyMatrix(VOCAB, 64, **given, max_num_reqs=MAX_NUM_REQS)
    largest.counts, largest.stamps = None, int32(len(largest.matrix.table))
    largest.successors = int32(BATCH * TREE_ROWS, 64)
    for name in ("place", "top_k", "walk", "compact"):
        yield Case(name, getattr(default, name))
    for name, step in (("default", default), ("largest", largest)):
        yield Case(f"learn-{name}", step.learn)
        yield Case(f"seed-{name}", partial(seed_prompts, step))
    yield Case("grow", default.grow, (80, 90, 100, 120))
    yield Case("grow-rows64", partial(grow_trees, default, rows=64), (90,))
    yield Case("grow-beam32", partial(grow_trees, default, beam=32), (90,))
    yield Case("grow-trunk", partial(grow_trees, default, gamma=4))
    for name in ("default", "paper-80"):
        tree = load_tree(name)
        yield Case(f"fill-{name}", partial(fill, *drafting(default, tree.num_nodes), tree=tree))


def make_step() -> Any:
    """A step of the GPU benchmarks, of two requests of Llama-3-8B."""
    sys.path.append(str(Path(__file__).parents[3] / "examples" / "gpu"))
    import kernel_timing

    os.environ.pop("TRITON_INTERPRET", None)  # which it has set where there is no GPU
    kernel_timing.DEVICE, kernel_timing.DTYPE = "cpu", torch.bfloat16
    import kernel_step

    # Not all requests teach.
    learns = torch.zeros(BATCH, dtype=torch.bool)
    kernel_step.learn = partial(kernel_step.learn, learns=learns)
    fake_gpu.select(80, lambda *_: None)
    sizes = {"max_num_reqs": MAX_NUM_REQS, "slots": 1 << 16, "text": MAX_MODEL_LEN, "layers": 2}
    step = kernel_step.StepInputs(kernel_step.StepCase(BATCH, TREE_ROWS, **sizes))
    # As vLLM has them.
    step.idx_mapping = step.idx_mapping.int()
    step.expanded_idx_mapping = step.expanded_idx_mapping.int()
    return step


def make_trees(rows: int = TREE_ROWS) -> DeviceTrees:
    return DeviceTrees.empty(rows - 1, MAX_NUM_REQS, depth=8, device="cpu")


def make_texts() -> Texts:
    return Texts(int32(MAX_NUM_REQS, MAX_MODEL_LEN), int32(MAX_NUM_REQS))


def penalise() -> None:
    of_requests = (torch.zeros(MAX_NUM_REQS) for _ in range(3))
    penalties = Penalties(
        *of_requests, int32(MAX_NUM_REQS, -(-VOCAB // 32)), int32(MAX_NUM_REQS, VOCAB)
    )
    penalise_paths(*sampled_rows(), parents=make_trees().parents, penalties=penalties)


def ban() -> None:
    widths = ((64,), (65,), (), (MAX_MODEL_LEN,), (), ())
    words = BadWords(*(int32(MAX_NUM_REQS, *width) for width in widths))
    ban_words(*sampled_rows(), parents=make_trees().parents, words=words, most_words=3)


def sampled_rows() -> tuple[torch.Tensor, ...]:
    """Logits, tokens, places in their trees and requests of some rows."""
    return torch.zeros(3, VOCAB), int64(3), int32(3), int32(3)


def move(dtype: torch.dtype, *width: int) -> None:
    """Token ids, positions, and hidden states of Llama-3-8B."""
    rows = BATCH * TREE_ROWS
    moved = torch.zeros(rows, *width, dtype=dtype)
    move_rows(moved, int64(rows), int32(BATCH + 1), int64(BATCH, 9))


def count_and_take(has_probabilities: bool) -> None:
    """Trunks of four tokens, as vLLM's speculators draft them: by place first."""
    choices = ChoiceAcceptance(int64(MAX_NUM_REQS))
    choices.has_probabilities = has_probabilities
    trunks = DeviceTrunks.empty(MAX_NUM_REQS, 4, choices)
    shape = (4, MAX_NUM_REQS, CHOICES)
    drafted = (values[:, :BATCH].transpose(0, 1) for values in (int64(*shape), torch.zeros(shape)))
    trunks.count(int32(BATCH), make_texts())
    trunks.take(int32(BATCH), make_texts(), Trunks(*drafted))


def seed_prompts(step: Any) -> None:
    given = {"req_state_indices": [0, 1], "lengths": [20, 30]}
    seed(step.matrix, step.stamps, int32(50), **given)


def drafting(step: Any, num_nodes: int) -> tuple:
    """What `grow` and `fill` begin with."""
    drafts, worths = int64(BATCH, num_nodes), torch.zeros(BATCH, num_nodes)
    return drafts, worths, step.matrix, step.counts.rates, step.idx_mapping, step.texts


def grow_trees(step: Any, *, rows: int = TREE_ROWS, beam: int = 16, gamma: int = 0) -> None:
    shape = (MAX_NUM_REQS, gamma, CHOICES)
    trunks = Trunks(int64(shape), torch.zeros(shape)) if gamma else None
    grow(*drafting(step, rows - 1), trees=make_trees(rows), beam=beam, trunks=trunks)


def ouroboros_cases() -> Iterator[Case]:
    """With the paper's sizes."""
    shape = DraftShape(gamma=12, window=20, guesses=20, phrase_length=7, branches=3)
    table = int32(1001, 20, shape.length)
    owners, phrases = int64(40), int64(40, shape.length)
    insert = partial(insert_phrases, table, owners, phrases)
    rows = BATCH * (1 + shape.num_nodes)
    yield Case("newest", partial(newest_phrases, table, int64(8), 3))
    yield Case("insert", insert)
    yield Case("insert-replacing", partial(insert, replaced=torch.zeros_like(phrases)))
    yield Case("harvest", partial(harvest, int64(rows), int64(rows), int32(3), shape=shape))
    start = RoundStart.make(BATCH, 20, 256, torch.device("cpu"))
    given = {
        "texts": int32(MAX_NUM_REQS, MAX_MODEL_LEN),
        "last_token_ids": int64(MAX_NUM_REQS, 1),
        "num_computed": int32(MAX_NUM_REQS),
        "num_cached": int64(MAX_NUM_REQS),
        "block_tables": int32(MAX_NUM_REQS, 256),
    }
    yield Case("begin-round", partial(begin_round, start, int64(BATCH), **given, block_size=16))
