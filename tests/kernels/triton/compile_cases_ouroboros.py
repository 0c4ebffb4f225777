"""What `compile_kernels` compiles of Ouroboros, with the paper's sizes."""

from __future__ import annotations

from collections.abc import Iterator

from compile_cases import Case

from vllm_recycle.kernels.triton.ouroboros import harvest, phrase_pool, round_starts


def ouroboros_cases() -> Iterator[Case]:
    yield from pool_cases()
    yield harvest_case()
    yield round_case()


def harvest_case() -> Case:
    names = ("run_owners", "runs", "tried_owners", "corrected", "replaced")
    return Case(
        "harvest",
        harvest._harvest_kernel,
        {
            **dict.fromkeys((*names, "row_token_ids", "sampled"), "*i64:16"),
            "cu_num_logits": "*i32:16",
        },
        {
            **{"GAMMA": 12, "LENGTH": 6, "RUNS": 8, "TRIED": 3},
            **{"ROWS": 16, "RUN_LANES": 8, "TRIED_LANES": 4, "TOKENS": 8},
        },
        {"num_warps": 1},
    )


def round_case() -> Case:
    starts = ("idx_mapping", "last_token_ids", "heads", "num_head", "num_cached", "slot_mapping")
    by_state = ("idx_mapping", "last_token_ids", "num_cached")
    return Case(
        "begin-round",
        round_starts._begin_round_kernel,
        {
            **dict.fromkeys((*(f"start_{name}" for name in starts), *by_state), "*i64:16"),
            **dict.fromkeys(("start_block_table", "block_tables", "texts"), "*i32:16"),
            "num_computed": "*i32:16",
            **dict.fromkeys(("text_stride", "table_stride", "start_table_stride"), "i32:16"),
        },
        {"BLOCK_SIZE": 16, "HEAD": 20, "PLACES": 32, "BLOCKS": 256},
        {"num_warps": 1},
    )


def pool_cases() -> Iterator[Case]:
    """Insertion and look-up."""
    sizes = {"PER_TOKEN": 20, "LENGTH": 6, "TOKENS": 8}
    pointers = {"table": "*i32:16", "token_ids": "*i64:16"}
    yield Case(
        "newest",
        phrase_pool._newest_phrases_kernel,
        {**pointers, "newest": "*i64:16"},
        {**sizes, "COUNT": 3, "PLACES": 4},
        {"num_warps": 1},
    )
    for replaces in (False, True):
        phrases = {"phrases": "*i64:16", **({"replaced": "*i64:16"} if replaces else {})}
        yield Case(
            "insert" + ("-replacing" if replaces else ""),
            phrase_pool._insert_phrases_kernel,
            {**pointers, **phrases, "num_phrases": "i32"},
            {
                **{**sizes, "PLACES": 32, "PHRASES": phrase_pool.PHRASES},
                **({} if replaces else {"replaced": None}),
            },
            {"num_warps": 1},
        )
