"""What `compile_kernels` compiles: each of our kernels, as launches of an engine have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# Imported by a script of its own alone.
import triton  # noqa: TID253
import triton.language as tl  # noqa: TID253
from triton.backends.compiler import GPUTarget  # noqa: TID253
from triton.compiler import ASTSource, CompiledKernel  # noqa: TID253

from vllm_recycle.core.adjacency import MatrixLayout
from vllm_recycle.core.tree import load_tree
from vllm_recycle.core.trunk import CHOICES
from vllm_recycle.kernels.triton import inputs, kv_cache, penalties
from vllm_recycle.kernels.triton import walk as walking
from vllm_recycle.kernels.triton.attention import kernel as attention_kernel
from vllm_recycle.kernels.triton.attention import splits as attention_splits
from vllm_recycle.kernels.triton.attention.tiles import Tile, choose_tile
from vllm_recycle.kernels.triton.matrix import fill as filling
from vllm_recycle.kernels.triton.matrix import grow as growing
from vllm_recycle.kernels.triton.matrix.find import Layout


@dataclass(frozen=True)
class Case:
    """A kernel as one launch has it compiled.

    Attributes:
        name: for people and tests.
        kernel: a `triton.jit` function.
        signature: type of each argument that is no constant, as `*bf16`, `i32`, `fp32`; `:16`
            behind it says that the pointer or the number is divisible by 16.
        constants: of the others.
        options: `num_warps`, `num_stages`.
        resident: programs that a multiprocessor is taken to run at a time.

    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)
    resident: int = 1

    def compile(self, arch: int) -> CompiledKernel:
        names = self.kernel.arg_names
        assert set(names) == {*self.signature, *self.constants}, self.name
        types = {name: self.signature.get(name, "constexpr").split(":")[0] for name in names}
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if self.signature.get(name, "").endswith(":16")
        }
        source = ASTSource(self.kernel, types, self.constants, aligned)
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=self.options)


def cases() -> Iterator[tuple[Case, int]]:
    """What to compile, and for which architecture."""
    # Which take `Case` from here.
    from compile_cases_learning import learning_cases
    from compile_cases_ouroboros import ouroboros_cases

    yield from tree_attention_cases()
    for arch in (80, 90):
        yield walk_case(), arch
        yield penalise_case(), arch
        yield ban_case(), arch
        yield place_case(), arch
        yield compact_case(), arch
        for case in (*ouroboros_cases(), *learning_cases()):
            yield case, arch
    for arch in (80, 90, 100, 120):
        yield grow_case(), arch
    yield grow_case(beam=32), 90
    yield grow_case(gamma=4), 80
    yield grow_case(gamma=4), 90
    for arch in (80, 90):
        for name in ("default", "paper-80"):
            yield fill_case(name), arch


TREE_ROWS = 81
# Heads of a group and head size: Llama-3, Gemma 3, Phi-2, Phi-3, Qwen2.
HEADS = [(4, 128), (2, 256), (1, 80), (1, 96), (7, 64)]


def tree_attention_cases() -> Iterator[tuple[Case, int]]:
    for arch in (80, 90):
        for group, head_size in HEADS:
            yield attend_case(arch, TREE_ROWS, group, head_size)
        # Smaller trees have smaller tiles.
        for rows in (16, 8, 4):
            yield attend_case(arch, rows, 4, 128)
        yield attend_case(arch, 32, 2, 256)
        yield attend_case(arch, TREE_ROWS, 4, 128, block_size=128)
        yield attend_case(arch, TREE_ROWS, 4, 128, dtype="fp16", split=False)
        # The smallest tiles, in contexts that are too short for shares.
        for rows in (8, 4):
            yield attend_case(arch, rows, 4, 128, split=False)
        yield attend_case(arch, TREE_ROWS, 4, 128, dtype="fp32")
        yield attend_case(arch, TREE_ROWS, 4, 128, own=True)
        yield attend_case(arch, TREE_ROWS, 4, 128, windowed=True)
        yield attend_case(arch, TREE_ROWS, 2, 256, windowed=True)
        # GPT-OSS.
        yield attend_case(arch, TREE_ROWS, 8, 64, windowed=True, split=False, sinks=True)
        yield combine_case(64, sinks=True), arch
        yield combine_case(128), arch
        yield combine_case(80), arch
    yield attend_case(100, TREE_ROWS, 4, 128)
    yield attend_case(120, TREE_ROWS, 4, 128)


def attend_case(
    arch: int,
    rows: int,
    group: int,
    head_size: int,
    *,
    block_size: int = 16,
    dtype: str = "bf16",
    split: bool = True,
    own: bool = False,
    windowed: bool = False,
    sinks: bool = False,
    tile: Tile | None = None,
) -> tuple[Case, int]:
    tile = tile or choose_tile(
        rows * group, head_size, itemsize=4 if dtype == "fp32" else 2, capability=arch // 10
    )
    strides = ("query_token", "query_head", "output_token", "output_head", "block", "head", "token")
    of_own = {
        "num_padding": "*i32",
        **dict.fromkeys(("own_keys", "own_values"), f"*{dtype}:16"),
        **dict.fromkeys(("own_key_stride", "own_value_stride"), "i32:16"),
    }
    case = Case(
        f"attend-{dtype}-rows{rows}-group{group}-head{head_size}-block{block_size}"
        + ("" if split else "-unsplit")
        + ("-own" if own else "")
        + ("-windowed" if windowed else "")
        + ("-sinks" if sinks else ""),
        attention_kernel.attend_kernel,
        {
            **dict.fromkeys(("query", "kv_cache", "output"), f"*{dtype}:16"),
            **dict.fromkeys(("partial", "partial_lse"), "*fp32:16" if split else f"*{dtype}:16"),
            "ancestor_bits": "*i32:16",
            **{"depths": "*i32:16", "idx_mapping": "*i64"},
            **dict.fromkeys(("query_start_loc", "seq_lens", "block_table"), "*i32"),
            "log2_scale": "fp32",
            **({"window": "i32"} if windowed else {}),
            **({"sinks": f"*{dtype}:16"} if sinks else {}),
            **dict.fromkeys(("max_rows", "num_splits", "num_queries"), "i32"),
            **dict.fromkeys(("num_words", "table_stride", "tree_stride", "depths_stride"), "i32"),
            **{f"{stride}_stride": "i32:16" for stride in strides},
            **(of_own if own else {}),
        },
        {
            "GROUP": group,
            "HEAD_SIZE": head_size,
            "BLOCK_SIZE": block_size,
            "BLOCK_M": tile.queries,
            "BLOCK_N": tile.tokens,
            "BLOCK_D": triton.next_power_of_2(head_size),
            "LEAST_TILES": 2,
            "SPLIT": split,
            "UPCAST": False,
            **({} if own else dict.fromkeys(of_own)),
            **({} if windowed else {"window": None}),
            **({} if sinks else {"sinks": None}),
        },
        {"num_warps": tile.warps, "num_stages": tile.stages},
        tile.resident,
    )
    return case, arch


def combine_case(head_size: int, *, sinks: bool = False) -> Case:
    return Case(
        f"combine-head{head_size}" + ("-sinks" if sinks else ""),
        attention_splits.combine_kernel,
        {
            **dict.fromkeys(("partial", "partial_lse"), "*fp32:16"),
            "output": "*bf16:16",
            **dict.fromkeys(("query_start_loc", "seq_lens"), "*i32"),
            **({"sinks": "*bf16:16"} if sinks else {}),
            **dict.fromkeys(("num_splits", "num_queries"), "i32"),
            **dict.fromkeys(("output_token_stride", "output_head_stride"), "i32:16"),
        },
        {
            **{"num_padding": None, "window": None},
            **({} if sinks else {"sinks": None}),
            "GROUP": 4,
            "HEAD_SIZE": head_size,
            "BLOCK_M": attention_splits.COMBINED_QUERIES,
            "BLOCK_N": 64,
            "BLOCK_D": triton.next_power_of_2(head_size),
            "LEAST_TILES": 2,
            "CHUNK": attention_splits.COMBINED_SPLITS,
        },
    )


# Llama-3's vocabulary, eight successors, a quarter of a million entries that are hashed.
LAYOUT = MatrixLayout(128_256, 8, (1, 2, 4, 16), 1 << 18, True, True)
TEXTS = {"all_token_ids": "*i32:16", "all_token_ids_stride": "i32:16", "lengths": "*i32:16"}


def grow_case(*, num_nodes: int = 80, beam: int = 16, levels: int = 8, gamma: int = 0) -> Case:
    trunk = {"trunk_token_ids": "*i64:16", "trunk_chances": "*fp32:16"}
    lanes, words = triton.next_power_of_2(num_nodes), -(-(num_nodes + 1) // 32)
    expanded = max(beam, lanes // LAYOUT.k)
    return Case(
        f"grow-nodes{num_nodes}-beam{beam}-levels{levels}-gamma{gamma}",
        growing._grow_kernel,
        {
            **dict.fromkeys(("drafts", "idx_mapping", "salts"), "*i64:16"),
            **dict.fromkeys(("worths", "rates"), "*fp32:16"),
            **dict.fromkeys(("parents", "depths", "ancestor_bits", "scratch", "table"), "*i32:16"),
            **TEXTS,
            **(trunk if gamma else {}),
        },
        {
            **({} if gamma else dict.fromkeys(trunk)),
            **{"GAMMA": gamma, "CHOICES": CHOICES if gamma else 0},
            **{"NODES": num_nodes, "LANES": lanes, "WORDS": words, "WORD_LANES": 4},
            **{"BEAM": beam, "EXPANDED": expanded, "CHILDREN": 8, "LEVELS": levels},
            "SIZE": levels * (2 * expanded * 8 + expanded) + 2 * expanded * 8,
            "LAYOUT": Layout.of(LAYOUT),
        },
        {"num_warps": growing._warps(expanded * 8)},
    )


def fill_case(name: str) -> Case:
    tree = load_tree(name)
    lanes = triton.next_power_of_2(tree.num_nodes + 1)
    return Case(
        f"fill-{name}",
        filling._fill_kernel,
        {
            **dict.fromkeys(("drafts", "idx_mapping", "salts"), "*i64:16"),
            **dict.fromkeys(("parents", "ranks", "depths"), "*i64:16"),
            **dict.fromkeys(("worths", "rates"), "*fp32:16"),
            **dict.fromkeys(("scratch", "table"), "*i32:16"),
            **TEXTS,
        },
        {
            **{"NODES": tree.num_nodes, "LANES": lanes, "LEVELS": tree.depth},
            "LAYOUT": Layout.of(LAYOUT),
        },
        {"num_warps": walking.num_warps(lanes)},
    )


def walk_case() -> Case:
    num_nodes, depth = TREE_ROWS - 1, 16
    lanes = triton.next_power_of_2(num_nodes + 1)
    return Case(
        "walk",
        walking._walk_kernel,
        {
            **dict.fromkeys(("path", "token_ids", "sampled", "draft_token_ids"), "*i64:16"),
            **{"lengths": "*i32:16", "cu_num_logits": "*i32", "parents": "*i32:16"},
            **{"parents_stride": "i32", "idx_mapping": "*i64:16"},
        },
        {
            **{"NODES": num_nodes, "PATH": depth + 1, "LANES": lanes},
            **{"PATH_LANES": triton.next_power_of_2(depth + 1), "ROUNDS": depth.bit_length()},
        },
        {"num_warps": walking.num_warps(lanes)},
    )


def penalise_case() -> Case:
    pointers = ("expanded_local_pos", "parents", "prompt_bits", "output_counts")
    strides = ("logits_stride", "parents_stride", "prompt_stride", "output_stride", "vocab_size")
    return Case(
        "penalise",
        penalties._penalise_kernel,
        {
            **dict.fromkeys(("logits", "repetition", "frequency", "presence"), "*fp32:16"),
            **dict.fromkeys(("row_token_ids", "expanded_idx_mapping"), "*i64:16"),
            **dict.fromkeys(pointers, "*i32:16"),
            **dict.fromkeys(strides, "i32"),
        },
        {"BLOCK": penalties.BLOCK},
    )


def ban_case() -> Case:
    pointers = ("expanded_local_pos", "parents", "word_token_ids", "offsets", "num_words")
    texts = ("texts", "prompt_lengths", "lengths")
    of = ("logits", "parents", "words", "offsets", "texts")
    return Case(
        "ban",
        penalties._ban_kernel,
        {
            "logits": "*fp32:16",
            **dict.fromkeys(("row_token_ids", "expanded_idx_mapping"), "*i64:16"),
            **dict.fromkeys((*pointers, *texts), "*i32:16"),
            **{f"{name}_stride": "i32" for name in of},
        },
        {},
    )


def place_case() -> Case:
    pointers = ("row_token_ids", "positions", "logits_indices", "tree_indices")
    return Case(
        "place",
        inputs._place_tree_rows_kernel,
        {
            **dict.fromkeys((*pointers, "idx_mapping", "expanded_idx_mapping"), "*i64:16"),
            **dict.fromkeys(("input_ids", "expanded_local_pos", "depths"), "*i32:16"),
            **dict.fromkeys(("batch", "num_rows"), "i32"),
        },
        {"ROWS": inputs.ROWS, "TREE_ROWS": TREE_ROWS},
        {"num_warps": 4},
    )


def compact_case() -> Case:
    """Llama-3-8B's cache in 16 bits."""
    return Case(
        "compact",
        kv_cache._compact_path_kernel,
        {
            **dict.fromkeys(("pointers", "slot_mapping", "logits_indices", "path"), "*i64:16"),
            "cu_num_logits": "*i32",
            **dict.fromkeys(("block_stride", "head_stride", "token_stride"), "i32:16"),
        },
        {
            **{"PATH": load_tree("default").depth + 1, "BLOCK_SIZE": 16, "HEADS": 8, "WIDTH": 64},
            **{"INTEGER": tl.int64, "ELEMENTS": kv_cache.ELEMENTS},
            "TOKENS": kv_cache.TOKENS,
        },
        {"num_warps": 4},
    )
