"""What `compile_kernels` compiles of what teaches the adjacency matrix."""

from __future__ import annotations

from collections.abc import Iterator

# Imported by a script of its own alone.
import triton  # noqa: TID253
from compile_cases import TEXTS, Case

from vllm_recycle.core.adjacency import MatrixLayout
from vllm_recycle.kernels.triton import top_k as choosing
from vllm_recycle.kernels.triton.matrix import learn as learning
from vllm_recycle.kernels.triton.matrix import seed as seeding
from vllm_recycle.kernels.triton.matrix.find import Layout

VOCAB, MAX_ROWS, PATH = 128_256, 81, 17


def learning_cases() -> Iterator[Case]:
    """With the default k and contexts; and with the largest, of a sequence that shares nothing."""
    yield from top_k_cases("bf16", vocab=VOCAB)
    yield from top_k_cases("fp32", vocab=32_000)
    for contexts, k, shares in (((1, 2, 4, 16), 8, True), (tuple(range(1, 17)), 64, False)):
        layout = MatrixLayout(VOCAB, k, contexts, 1 << 22, True, shares)
        yield from step_cases(layout, counted=shares)
        yield from seed_cases(layout)


def top_k_cases(dtype: str, *, vocab: int) -> Iterator[Case]:
    k = 8
    group = choosing.group_size(vocab, k)
    rows = {"maxima": "*fp32:16", "logits": f"*{dtype}:16", "row_stride": "i32:16"}
    sizes = {"VOCAB": vocab, "GROUP": group}
    yield Case(
        f"maxima-{dtype}-vocab{vocab}",
        choosing._group_maxima_kernel,
        rows,
        {**sizes, "GROUPS": choosing.CHUNK // group},
        {"num_warps": 8},
    )
    yield Case(
        f"top-k-{dtype}-vocab{vocab}",
        choosing._top_k_kernel,
        {**rows, "best": "*i32:16"},
        {**sizes, "K": k, "KEPT": k, "GROUPS": triton.next_power_of_2(-(-vocab // group))},
        {"num_warps": 8},
    )


def step_cases(layout: MatrixLayout, *, counted: bool) -> Iterator[Case]:
    name = f"k{layout.k}-contexts{len(layout.contexts)}"
    kinds, of_counts = 2 * len(layout.contexts), ("counts", "rates", "increments")
    rows = {
        **dict.fromkeys(("table", "stamps", "numbers", "heads", "idx_mapping"), "*i32:16"),
        **dict.fromkeys(("addresses", "salts"), "*i64:16"),
        "cu_num_logits": "*i32",
    }
    yield Case(
        f"learn-mark-{name}",
        learning._mark_step_kernel,
        {
            **rows,
            **dict.fromkeys(("text", "row_token_ids", "path", "token_ids"), "*i64:16"),
            **{"parents": "*i32:16", "learns": "*i32", **TEXTS},
            **({"increments": "*i32:16"} if counted else {}),
        },
        {
            **{"MAX_ROWS": MAX_ROWS, "TREE_ROWS": MAX_ROWS, "PATH": PATH},
            **{"PATH_LANES": triton.next_power_of_2(PATH), "LANES": learning.LANES},
            "LAYOUT": Layout.of(layout),
            **({} if counted else {"increments": None}),
        },
        {"num_warps": 1},
    )
    width, ranks = triton.next_power_of_2(layout.width), kinds * layout.k
    types = dict(zip(of_counts, ("*fp64:16", "*fp32:16", "*i32:16"), strict=True))
    yield Case(
        f"learn-write-{name}",
        learning._write_step_kernel,
        {**rows, "successors": "*i32:16", "rows": "i32", **(types if counted else {})},
        {
            **{"MAX_ROWS": MAX_ROWS, "K": layout.k, "WIDTH": width},
            **{"ROWS": max(1, learning.ELEMENTS // width), "KINDS": kinds},
            "WRITTEN": len(layout.contexts) * (1 + layout.has_shared),
            **{"FIRST_KIND": 1 - layout.has_shared, "KIND_STEP": 2 - layout.has_shared},
            **{"RANKS": ranks, "LANES": learning.LANES},
            "FOLD_BLOCKS": -(-ranks // learning.LANES) if counted else 0,
            **({} if counted else dict.fromkeys(of_counts)),
        },
        {"num_warps": 1},
    )


def seed_cases(layout: MatrixLayout) -> Iterator[Case]:
    name = f"k{layout.k}-contexts{len(layout.contexts)}"
    rows = {
        **dict.fromkeys(("stamps", "heads", "of_salts", "followers"), "*i32:16"),
        "addresses": "*i64:16",
    }
    found = dict.fromkeys(("seconds", "thirds", "runs"), "*i32:16")
    sizes = {"count": "i32", "size": "i32"}
    shape = {"LENGTHS": len(layout.contexts), "LANES": seeding.LANES}
    yield Case(
        f"seed-mark-{name}",
        seeding._mark_prompt_kernel,
        {
            **{**rows, **found, **sizes, "rests": "*i64:16", "table": "*i32:16"},
            **{"token_ids": "*i32:16", "salts": "*i64:16"},
            **{"requests": "*i32:16", "num_requests": "i32", "first": "i32"},
        },
        {"BITS": 5, "LANES": seeding.LANES, "LAYOUT": Layout.of(layout)},
        {"num_warps": 1},
    )
    for last in (False, True):
        yield Case(
            f"seed-gather-{name}" + ("-last" if last else ""),
            seeding._gather_kernel,
            {**rows, **found, **sizes},
            {**shape, "LAST": last},
            {"num_warps": 1},
        )
    shape["K"] = layout.k
    yield Case(
        f"seed-merge-{name}",
        seeding._merge_kernel,
        {
            **{**rows, **found, **sizes, "rests": "*i64:16"},
            **dict.fromkeys(("merged", "table"), "*i32:16"),
        },
        shape,
        {"num_warps": 1},
    )
    yield Case(
        f"seed-write-{name}",
        seeding._write_prompt_kernel,
        {
            **{**sizes, "addresses": "*i64:16"},
            **dict.fromkeys(("table", "stamps", "merged"), "*i32:16"),
        },
        {**shape, "WIDTH": triton.next_power_of_2(layout.width)},
        {"num_warps": 1},
    )
