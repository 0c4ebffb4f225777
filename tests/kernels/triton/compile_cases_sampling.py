"""The kernel that chooses rows to sample, as `compile_kernels` compiles it."""

from __future__ import annotations

# Imported by a script of its own alone.
import triton  # noqa: TID253
import triton.language as tl  # noqa: TID253
from compile_cases import Case

from vllm_recycle.kernels.triton import visitable_rows


@triton.jit
def noised_argmax(
    logits: tl.tensor,
    keys: tl.tensor,
    mask: tl.tensor,
    seed: tl.tensor,
    pos: tl.tensor,
    temp: tl.tensor,
    is_drafting: tl.constexpr,
    use_fp64: tl.constexpr,
) -> tl.tensor:
    """In the place of vLLM's, which is not imported here: as much noise, in few lines."""
    if temp != 0.0:
        u = tl.rand(seed, pos * 65536 + keys)
        logits = tl.where(mask, logits / temp - tl.log(-tl.log(u)), float("-inf"))
    return tl.max(logits, axis=0, return_indices=True)


def visitable_rows_case() -> Case:
    """Grown trees of 80 nodes, with eight successors a row."""
    pointers = ("rows", "drafts", "draft_token_ids", "idx_mapping", "positions", "logits_indices")
    return Case(
        "visitable-rows",
        visitable_rows._choose_rows_kernel,
        {
            **dict.fromkeys(pointers, "*i64:16"),
            **{"logits": "*bf16:16", "row_stride": "i32:16", "cu_num_logits": "*i32"},
            **dict.fromkeys(("successors", "parents"), "*i32:16"),
            **{"temperatures": "*fp32:16", "seeds": "*i64:16"},
        },
        {
            **{"NODES": 80, "LANES": 128, "K": 8, "CANDIDATES": 16, "MOST": 16, "PLACES": 16},
            **{"ROUNDS": 4, "NOISED_ARGMAX": noised_argmax, "USE_FP64": False},
        },
        {"num_warps": 4},
    )
