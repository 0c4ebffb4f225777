"""The C++ kernels: building, calling, and the set of operations they make.

They are compiled at first use for the machine's own instruction set (vLLM's default compile mode
needs the same compiler) and kept in a cache directory. Without a compiler the torch functions
that they are twins of do the work, and a warning says so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int64, c_void_p
from dataclasses import replace
from pathlib import Path

import torch

from vllm_recycle.core.operations import REFERENCE, Operations
from vllm_recycle.core.template_matrix import TemplateLayout
from vllm_recycle.core.tree import Trees, TreeTemplate
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.kernels.cpu import tree_attention as torch_attention
from vllm_recycle.kernels.cpu.tree_attention import TreeQueries

logger = logging.getLogger("vllm.recycle")

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / f"{name}.cpp" for name in ("operations", "dynamic", "tree_attention"))
HEADERS = tuple(
    FOLDER / f"{name}.h" for name in ("amx", "lanes", "softmax", "top_k", "tree_columns")
)
# Not -ffast-math, which would change the floating-point mode of the whole process.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-strict-aliasing")
DTYPES = (torch.float32, torch.bfloat16)
LANES = 16
NO_WINDOW = 2**62  # more tokens than a text has

# Arguments of each function: p pointer, i int64, f float.
SIGNATURES = {
    "tree_attention": "pppppppppppp" + "iiiiiiiiiiiiiiii" + "f" + "i",
    "fill_tree": "ppppp" + "iiiiii" + "p",
    "walk": "ppppp" + "iiiii" + "ppp",
    "update_from_logits": "pppp" + "iiiiiiiii",
    "newest_phrases": "pp" + "iiii" + "p",
    "insert_phrases": "pppp" + "iii",
    # The first ten are of a MatrixLayout.
    "grow": "pp" + "iiiiiiii" + "pppppp" + "iiii" + "ppppp",
    "learn": "pp" + "iiiiiiii" + "pppp" + "i" + "ppppp" + "ii",
    "seed": "pp" + "iiiiiiii" + "pii",
    "top_k_rows": "p" + "iiiiii" + "p",
}


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels; None where this machine cannot compile them."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        logger.warning("no g++ found: the CPU kernels of vllm_recycle run in torch, and slower")
        return None
    library = ctypes.CDLL(str(_build(compiler)))
    types = {"p": c_void_p, "i": c_int64, "f": c_float}
    for name, signature in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [types[letter] for letter in signature]
        function.restype = None
    library.reads_amx_layout.restype = c_int64
    return library


def _build(compiler: str) -> Path:
    """Compile once for each source, compiler, flags and CPU; safe against other processes."""
    cpu = Path("/proc/cpuinfo")
    flags = [line for line in cpu.read_text().splitlines() if line.startswith("flags")][:1]
    texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
    identity = repr((texts, compiler, FLAGS, platform.machine(), flags))
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm_recycle"
    path = root / f"cpu_native-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            built = Path(folder) / path.name
            command = [compiler, *FLAGS, "-shared", "-fPIC", *map(str, SOURCES), "-o", str(built)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise RuntimeError(
                    f"{compiler} cannot compile the kernels; set CXX to a compiler with C++17:\n"
                    f"{result.stderr}"
                )
            built.replace(path)
    return path


def pointer(tensor: torch.Tensor, dtype: torch.dtype = torch.int64) -> int:
    """For C++, which believes what it is given."""
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def rows_pointer(tensor: torch.Tensor) -> int:
    """For C++, of int64 rows, each contiguous, which may be one and the same (stride 0)."""
    assert tensor.dtype == torch.int64
    assert tensor.stride(-1) == 1
    return tensor.data_ptr()


def native_operations() -> Operations:
    """The C++ set, or the torch set where it cannot be built."""
    if load_library() is None:
        return REFERENCE
    return replace(
        REFERENCE,
        name="c++",
        fill_tree=fill_tree,
        update_from_logits=update_from_logits,
        walk=walk,
        insert_phrases=insert_phrases,
        newest_phrases=newest_phrases,
    )


def fill_tree(
    table: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_token_ids: torch.Tensor,
    *,
    tree: TreeTemplate,
    layout: TemplateLayout,
) -> torch.Tensor:
    """See `vllm_recycle.core.template_matrix.fill_tree`."""
    batch, rows = last_token_ids.shape[0], tree.num_nodes + 1
    filled = torch.empty(batch, rows, dtype=torch.int64)
    idx_mapping, last_token_ids = idx_mapping.contiguous(), last_token_ids.contiguous()
    load_library().fill_tree(  # type: ignore[union-attr]
        pointer(table, torch.int32),
        pointer(idx_mapping),
        pointer(last_token_ids),
        pointer(tree.parents),
        pointer(tree.ranks),
        batch,
        rows,
        layout.vocab_size,
        1 + layout.k,
        layout.overlay_rows,
        layout.reads_shared,
        pointer(filled),
    )
    return filled[:, 1:]


def update_from_logits(
    table: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    logits: torch.Tensor,
    *,
    layout: TemplateLayout,
) -> None:
    """See `vllm_recycle.core.template_matrix.update_from_logits`."""
    if logits.dtype not in DTYPES or logits.stride(1) != 1:
        logits = logits.float().contiguous()
    expanded_idx_mapping, token_ids = expanded_idx_mapping.contiguous(), token_ids.contiguous()
    load_library().update_from_logits(  # type: ignore[union-attr]
        pointer(table, torch.int32),
        pointer(expanded_idx_mapping),
        pointer(token_ids),
        logits.data_ptr(),
        token_ids.shape[0],
        logits.stride(0),
        layout.vocab_size,
        logits.shape[1],
        layout.k,
        layout.overlay_rows,
        layout.writes_shared,
        logits.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def walk(
    sampled: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    *,
    tree: TreeTemplate | Trees,
) -> WalkResult:
    """See `vllm_recycle.core.verification.walk`."""
    batch, length = draft_token_ids.shape[0], tree.depth + 1
    path = torch.empty(batch, length, dtype=torch.int64)
    token_ids = torch.empty_like(path)
    lengths = torch.empty(batch, dtype=torch.int32)
    sampled, draft_token_ids = sampled.contiguous(), draft_token_ids.contiguous()
    cu_num_logits = cu_num_logits.long()
    trees = tree.of_batch(batch)
    load_library().walk(  # type: ignore[union-attr]
        pointer(sampled),
        pointer(draft_token_ids),
        pointer(cu_num_logits),
        rows_pointer(trees.parents),
        rows_pointer(trees.depths),
        trees.parents.stride(0),
        trees.depths.stride(0),
        batch,
        trees.num_nodes,
        length,
        pointer(path),
        pointer(token_ids),
        pointer(lengths, torch.int32),
    )
    return WalkResult(path, token_ids, lengths)


def newest_phrases(rows: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
    """See `vllm_recycle.core.phrase_pool.newest_phrases`."""
    _, per_token, length = rows.shape
    newest = torch.empty(*token_ids.shape, count, length, dtype=torch.int64)
    token_ids = token_ids.contiguous()
    load_library().newest_phrases(  # type: ignore[union-attr]
        pointer(rows, torch.int32),
        pointer(token_ids),
        token_ids.numel(),
        count,
        per_token,
        length,
        pointer(newest),
    )
    return newest


def insert_phrases(
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    phrases: torch.Tensor,
    *,
    replaced: torch.Tensor | None = None,
) -> None:
    """See `vllm_recycle.core.phrase_pool.insert_phrases`."""
    _, per_token, length = rows.shape
    token_ids, phrases = token_ids.contiguous(), phrases.contiguous()
    replaced = None if replaced is None else replaced.contiguous()
    load_library().insert_phrases(  # type: ignore[union-attr]
        pointer(rows, torch.int32),
        pointer(token_ids),
        pointer(phrases),
        None if replaced is None else pointer(replaced),
        len(token_ids),
        per_token,
        length,
    )


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    *,
    trees: TreeQueries,
    scale: float,
    isa: str,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """See `vllm_recycle.kernels.cpu.tree_attention.tree_attention`, which serves what this cannot.

    That is float16, head sizes that are no multiple of 16, and the AMX layout where the compiler
    or the system has no AMX.
    """
    library = load_library()
    head_size = query.shape[2]
    if (
        library is None
        or query.dtype not in DTYPES
        or head_size % LANES
        or (isa == "amx" and not library.reads_amx_layout())
    ):
        torch_attention.tree_attention(
            query,
            kv_cache,
            output,
            trees=trees,
            scale=scale,
            isa=isa,
            own=own,
            window=window,
            sinks=sinks,
        )
        return
    assert kv_cache.dtype == output.dtype == query.dtype
    assert kv_cache.is_contiguous()
    assert trees.block_table.dtype == torch.int32
    assert trees.block_table.stride(1) == 1
    assert query.stride(2) == output.stride(2) == 1
    assert query.stride(1) == output.stride(1) == head_size
    mask = trees.trees.ancestor_mask
    assert mask.stride(2) == 1
    own_pointers, own_strides = (0, 0), (0, 0)
    if own is not None:
        for side in own:
            assert side.dtype == query.dtype
            assert side.stride()[1:] == (head_size, 1)
        own_pointers = (own[0].data_ptr(), own[1].data_ptr())
        own_strides = (own[0].stride(0), own[1].stride(0))
    if sinks is not None:
        assert len(sinks) == query.shape[1]
        sinks = sinks.float()
    library.tree_attention(
        query.data_ptr(),
        output.data_ptr(),
        kv_cache.data_ptr(),
        *own_pointers,
        pointer(trees.first),
        pointer(trees.num_rows),
        pointer(trees.num_context),
        trees.block_table.data_ptr(),
        mask.data_ptr(),
        rows_pointer(trees.trees.depths),
        None if sinks is None else pointer(sinks, torch.float32),
        len(trees.first),
        query.shape[1],
        kv_cache.shape[1],
        head_size,
        kv_cache.shape[2],
        query.stride(0),
        output.stride(0),
        trees.block_table.stride(0),
        mask.stride(0),
        mask.stride(1),
        trees.trees.depths.stride(0),
        *own_strides,
        NO_WINDOW if window is None else window,
        isa == "amx",
        query.dtype == torch.bfloat16,
        scale,
        torch.get_num_threads(),
    )
