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
from vllm_recycle.core.template_matrix import OVERLAY_ROWS

from vllm_recycle.core import TemplateLayout, load_tree
from vllm_recycle.core.adjacency import MatrixLayout
from vllm_recycle.kernels.triton import inputs, kv_cache
from vllm_recycle.kernels.triton import top_k as learning
from vllm_recycle.kernels.triton import walk as nodes
from vllm_recycle.kernels.triton.attention import kernel as attention_kernel
from vllm_recycle.kernels.triton.attention import splits as attention_splits
from vllm_recycle.kernels.triton.attention.tiles import Tile, choose_tile
from vllm_recycle.kernels.triton.matrix import find
from vllm_recycle.kernels.triton.matrix import grow as growing


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
        for case in (*matrix_cases("bf16", vocab=128_256), *matrix_cases("fp32", vocab=32_000)):
            yield case, arch
        for grown in (False, True):
            yield walk_case(grown=grown), arch
            yield place_case(grown=grown), arch
        yield compact_case(), arch
        for case in (*ouroboros_cases(), *learning_cases()):
            yield case, arch
    for arch in (80, 90, 100, 120):
        yield grow_case(), arch
    yield grow_case(beam=32), 90


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
        yield attend_case(arch, TREE_ROWS, 4, 128, grown=True)
        yield attend_case(arch, TREE_ROWS, 4, 128, grown=True, windowed=True)
        yield attend_case(arch, TREE_ROWS, 2, 256, windowed=True)
        # GPT-OSS.
        yield attend_case(
            arch, TREE_ROWS, 8, 64, grown=True, windowed=True, split=False, sinks=True
        )
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
    grown: bool = False,
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
    of_grown = {"idx_mapping": "*i64", "tree_stride": "i32", "depths_stride": "i32"}
    case = Case(
        f"attend-{dtype}-rows{rows}-group{group}-head{head_size}-block{block_size}"
        + ("" if split else "-unsplit")
        + ("-own" if own else "")
        + ("-grown" if grown else "")
        + ("-windowed" if windowed else "")
        + ("-sinks" if sinks else ""),
        attention_kernel.attend_kernel,
        {
            **dict.fromkeys(("query", "kv_cache", "output"), f"*{dtype}:16"),
            **dict.fromkeys(("partial", "partial_lse"), "*fp32:16" if split else f"*{dtype}:16"),
            "ancestor_bits": "*i32:16",
            "depths": "*i32:16" if grown else "*i64:16",
            **dict.fromkeys(("query_start_loc", "seq_lens", "block_table"), "*i32"),
            "log2_scale": "fp32",
            **({"window": "i32"} if windowed else {}),
            **({"sinks": f"*{dtype}:16"} if sinks else {}),
            **dict.fromkeys(("max_rows", "num_splits", "num_queries"), "i32"),
            **dict.fromkeys(("num_words", "table_stride"), "i32"),
            **{f"{stride}_stride": "i32:16" for stride in strides},
            **(of_own if own else {}),
            **(of_grown if grown else {}),
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
            **({} if grown else dict.fromkeys(of_grown)),
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


def matrix_cases(dtype: str, *, vocab: int) -> Iterator[Case]:
    """Fill and update, as an engine with the default tree, k and scope launches them."""
    tree, layout = load_tree("default"), TemplateLayout(vocab, 8, OVERLAY_ROWS, True, True)
    name, lanes = f"{dtype}-vocab{vocab}", triton.next_power_of_2(tree.num_nodes)
    shape = {"NODES": tree.num_nodes, "PATH": tree.depth + 1, "LANES": lanes}
    table = {"FIRST_OVERLAY": layout.first_overlay, "OVERLAY_ROWS": layout.overlay_rows}
    ids = dict.fromkeys(("expanded_idx_mapping", "token_ids"), "*i64:16")
    yield Case(
        f"fill-{name}",
        nodes._fill_tree_kernel,
        {
            "table": "*i32:16",
            **dict.fromkeys(("drafts", "idx_mapping", "last_token_ids"), "*i64:16"),
            **dict.fromkeys(("paths", "ranks"), "*i64:16"),
        },
        {**shape, **table, "WIDTH": 1 + layout.k, "READS_SHARED": True},
        {"num_warps": nodes._warps(lanes)},
    )
    group = learning.group_size(vocab, layout.k)
    rows = {**ids, "maxima": "*fp32:16", "logits": f"*{dtype}:16", "row_stride": "i32:16"}
    sizes = {"VOCAB": vocab, "GROUP": group, "LATER": learning.LATER}
    yield Case(
        f"maxima-{name}",
        learning._group_maxima_kernel,
        {**rows, "num_rows": "i32"},
        {**sizes, "GROUPS": learning.CHUNK // group},
        {"num_warps": 8},
    )
    yield Case(
        f"write-{name}",
        learning._write_rows_kernel,
        {**rows, "num_rows": "i32", "table": "*i32:16"},
        {
            **{**sizes, **table, "K": layout.k, "KEPT": layout.k, "WRITES_SHARED": True},
            "GROUPS": triton.next_power_of_2(-(-vocab // group)),
        },
        {"num_warps": 8},
    )


def grow_case(*, num_nodes: int = 80, beam: int = 16, levels: int = 8) -> Case:
    """Llama-3's vocabulary, eight successors, a quarter of a million rows that are hashed."""
    layout = MatrixLayout(128_256, 8, (1, 2, 4, 8), 1 << 18, True, True, True)
    lanes, words = triton.next_power_of_2(num_nodes), -(-(num_nodes + 1) // 32)
    expanded = max(beam, lanes // layout.k)
    return Case(
        f"grow-nodes{num_nodes}-beam{beam}-levels{levels}",
        growing._grow_kernel,
        {
            **dict.fromkeys(("drafts", "idx_mapping", "salts", "tails", "max_depths"), "*i64:16"),
            **dict.fromkeys(("worth", "rates"), "*fp32:16"),
            **dict.fromkeys(("parents", "depths", "ancestor_bits", "scratch", "table"), "*i32:16"),
        },
        {
            **{"NODES": num_nodes, "LANES": lanes, "WORDS": words, "WORD_LANES": 4},
            **{"BEAM": beam, "EXPANDED": expanded, "CHILDREN": 8, "LEVELS": levels},
            **{"REACH": 8, "PLACES": 8},
            "SIZE": levels * (2 * expanded * 8 + expanded) + 2 * expanded * 8,
            **find.constants_of(layout),
        },
        {"num_warps": growing._warps(expanded * 8)},
    )


def walk_case(*, grown: bool) -> Case:
    """The default tree, or trees that are grown."""
    tree = load_tree("default")
    num_nodes, depth = (80, 8) if grown else (tree.num_nodes, tree.depth)
    lanes = triton.next_power_of_2(num_nodes + 1)
    return Case(
        "walk" + ("-grown" if grown else ""),
        nodes._walk_kernel,
        {
            **dict.fromkeys(("path", "token_ids", "sampled", "draft_token_ids"), "*i64:16"),
            **{"lengths": "*i32:16", "cu_num_logits": "*i32"},
            "parents": "*i32:16" if grown else "*i64:16",
            **({"idx_mapping": "*i64:16"} if grown else {}),
        },
        {
            **{"NODES": num_nodes, "PATH": depth + 1, "LANES": lanes},
            **{"PLACES": triton.next_power_of_2(depth + 1), "ROUNDS": depth.bit_length()},
            **({} if grown else {"idx_mapping": None}),
        },
        {"num_warps": nodes._warps(lanes)},
    )


def place_case(*, grown: bool) -> Case:
    pointers = ("row_token_ids", "positions", "logits_indices")
    return Case(
        "place" + ("-grown" if grown else ""),
        inputs._place_tree_rows_kernel,
        {
            **dict.fromkeys(pointers, "*i64:16"),
            **dict.fromkeys(("input_ids", "expanded_local_pos"), "*i32:16"),
            "depths": "*i32:16" if grown else "*i64:16",
            **({"expanded_idx_mapping": "*i64:16"} if grown else {}),
            "num_rows": "i32",
        },
        {
            **{"ROWS": inputs.ROWS, "TREE_ROWS": TREE_ROWS},
            **({} if grown else {"expanded_idx_mapping": None}),
        },
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
            "PLACES": kv_cache.PLACES,
        },
        {"num_warps": 4},
    )
