"""Calling the C++ kernels: with tensors, as the torch functions that they are twins of are called.

This module satisfies `vllm_recycle.core.operations.Operations`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_int64, c_void_p
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch

from vllm_recycle.core.adjacency import MAX_CONTEXT, AdjacencyMatrix, Ends
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grow import Allowed, Grammar, TextEnds, Trunks
from vllm_recycle.core.harvest import harvest as harvest
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.price import CHAINS, TREES
from vllm_recycle.core.tree import Trees, TreeTemplate
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.kernels.cpu import kv_cache as torch_kv_cache
from vllm_recycle.kernels.cpu import tree_attention as torch_attention
from vllm_recycle.kernels.cpu.build import load_library
from vllm_recycle.kernels.cpu.tree_attention import TreeQueries

name = "c++"

DTYPES = (torch.float32, torch.bfloat16)
LANES = 16
NO_WINDOW = 2**62  # more tokens than a text has


# Numbers of a `MatrixLayout`, as `Matrix` in matrix.cpp has them.
NUMBERS = ("vocab_size", "k", "slots", "has_own", "has_shared", "parts")


class _Matrix(ctypes.Structure):
    """As `Matrix` in matrix.cpp."""

    _fields_ = (
        ("table", c_void_p),
        ("salts", c_void_p),
        *((name, c_int64) for name in NUMBERS),
        ("num_contexts", c_int64),
        ("lengths", c_int64 * MAX_CONTEXT),
    )


class _Queries(ctypes.Structure):
    """As `Queries` in tree_columns.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("first", "num_rows", "num_context")),
        *((name, c_void_p) for name in ("block_table", "mask", "depths")),
        *((name, c_int64) for name in ("batch", "table_stride", "mask_batch_stride")),
        *((name, c_int64) for name in ("mask_stride", "depths_stride")),
    )


# What C++ reads, made once: of a matrix, which keeps its tensors, and of what all layers share.
_MADE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _matrix(matrix: AdjacencyMatrix) -> Any:
    """For C++."""
    if (known := _MADE.get(matrix)) is None:
        layout, table = matrix.layout, _pointer(matrix.table, torch.int32)
        numbers = (*(getattr(layout, name) for name in NUMBERS), len(layout.contexts))
        known = ctypes.byref(_Matrix(table, _pointer(matrix.salts), *numbers, layout.contexts))
        _MADE[matrix] = known
    return known


def _queries(queries: TreeQueries) -> Any:
    """For C++."""
    if (known := _MADE.get(queries)) is None:
        table, trees = queries.block_table, queries.trees
        mask, depths = trees.ancestor_mask, trees.depths
        assert table.dtype == torch.int32
        assert table.stride(1) == mask.stride(2) == 1
        known = _MADE[queries] = ctypes.byref(
            _Queries(
                *_pointers(queries.first, queries.num_rows, queries.num_context),
                *(table.data_ptr(), mask.data_ptr(), _rows_pointer(depths)),
                *(len(queries.first), table.stride(0), mask.stride(0), mask.stride(1)),
                depths.stride(0),
            )
        )
    return known


def _library() -> ctypes.CDLL:
    library = load_library()
    assert library is not None, "no C++ compiler"
    return library


def _pointer(tensor: torch.Tensor | None, dtype: torch.dtype = torch.int64) -> int | None:
    """For C++, which believes what it is given; None stays None."""
    if tensor is None:
        return None
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    """For C++, of int64 tensors."""
    return [_pointer(tensor) for tensor in tensors]


def _numbers(values: Sequence[int]) -> Any:
    """For C++, as int64."""
    return (c_int64 * len(values))(*values)


def _rows_pointer(tensor: torch.Tensor) -> int:
    """For C++, of int64 rows, each contiguous, which may be one and the same (stride 0)."""
    assert tensor.dtype == torch.int64
    assert tensor.stride(-1) == 1
    return tensor.data_ptr()


def _ends(ends: Ends) -> tuple[Any, ...]:
    """For C++: tokens, which of them are tokens, the stride of both, and the last places."""
    token_ids, is_token = ends.token_ids, ends.is_token
    assert token_ids.dtype == torch.int32
    assert token_ids.stride(1) == 1
    flags = None
    if is_token is not None:
        assert is_token.dtype == torch.bool
        assert is_token.stride() == token_ids.stride()
        flags = is_token.data_ptr()
    return token_ids.data_ptr(), flags, token_ids.stride(0), _numbers(ends.last)


def _trunks(trunks: Trunks | None, batch: int) -> tuple[int | None, int | None, int, int]:
    """For C++: tokens, chances, gamma and choices."""
    if trunks is None:
        return None, None, 0, 0
    assert trunks.token_ids.shape == trunks.chances.shape
    assert len(trunks.token_ids) == batch
    chances = _pointer(trunks.chances, torch.float64)
    _, gamma, choices = trunks.token_ids.shape
    return _pointer(trunks.token_ids), chances, gamma, choices


class _Allowed(ctypes.Structure):
    """As `Allowed` in matrix.cpp."""

    _fields_ = (("words", c_void_p), ("num_words", c_int64), ("expected", c_int64))


ASK = ctypes.CFUNCTYPE(None, c_int64, POINTER(c_int64), c_int64, POINTER(_Allowed))


@contextmanager
def _grammars(grammars: Sequence[Grammar | None] | None) -> Iterator[tuple[Any, Any]]:
    """For C++: which texts have a grammar, and a function that asks it."""
    if grammars is None or not any(grammars):
        yield None, None
        return
    failures: list[Exception] = []
    kept: Allowed | None = None  # C++ reads its words until it asks again

    def ask(b: int, path: Any, length: int, allowed: Any) -> None:
        nonlocal kept
        try:
            grammar = grammars[b]
            kept = grammar.allowed(path[:length]) if grammar else None
            if kept is not None:
                words = _pointer(kept.words, torch.int32)
                allowed[0] = _Allowed(words, len(kept.words), kept.expected)
        except Exception as error:  # which ends here, below C++
            failures.append(error)

    yield _numbers([grammar is not None for grammar in grammars]), ASK(ask)
    if failures:
        raise failures[0]


def draft(
    matrix: AdjacencyMatrix,
    counts: torch.Tensor,
    texts: TextEnds,
    *,
    prices: Mapping[str, torch.Tensor],
    max_nodes: int,
    tree: TreeTemplate | None = None,
) -> Drafts:
    """See `vllm_recycle.core.draft.draft`."""
    batch = len(texts.idx_mapping)
    assert len(texts.ends.last) == len(texts.max_depths) == batch
    found = (c_int64 * (batch * (1 + 2 * max_nodes)))()
    template = (None,) * 3 if tree is None else (tree.parents, tree.ranks, tree.depths)
    (num_times,) = {len(times) for times in prices.values()}
    rate = ctypes.c_double()
    with _grammars(texts.grammars) as grammars:
        size = _library().draft(
            _matrix(matrix),
            _pointer(counts, torch.float64),
            _pointer(texts.idx_mapping),
            *_ends(texts.ends),
            _numbers(texts.max_depths),
            *_trunks(texts.trunks, batch),
            *grammars,
            batch,
            max_nodes,
            *_pointers(*template),
            0 if tree is None else tree.num_nodes,
            *(_pointer(prices.get(kind), torch.float64) for kind in (TREES, CHAINS)),
            num_times,
            found,
            ctypes.byref(rate),
        )
    numbers = iter(found[:size])
    drafts = Drafts([], [], rate.value)
    for count in numbers:
        for of_each in (drafts.token_ids, drafts.parents):
            of_each.append(list(islice(numbers, count)))
    return drafts


def learn(
    matrix: AdjacencyMatrix, counts: torch.Tensor | None, ends: Ends, step: VerifiedStep
) -> None:
    """See `vllm_recycle.core.learn.learn`."""
    assert len(ends.last) == len(step.idx_mapping)
    path, token_ids = step.walked.path.contiguous(), step.walked.token_ids.contiguous()
    _library().learn(
        _matrix(matrix),
        _pointer(counts, torch.float64),
        _pointer(step.idx_mapping),
        *_ends(ends),
        _rows_pointer(step.parents),
        step.parents.stride(0),
        *_pointers(step.row_token_ids, step.cu_num_logits),
        _pointer(step.successors, torch.int32),
        *_pointers(path, token_ids),
        path.shape[1],
        len(step.idx_mapping),
    )


def seed(matrix: AdjacencyMatrix, req_state_idx: int, token_ids: torch.Tensor) -> None:
    """See `vllm_recycle.core.learn.seed`."""
    _library().seed(_matrix(matrix), _pointer(token_ids), len(token_ids), req_state_idx)


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `vllm_recycle.core.learn.top_k`."""
    if logits.dtype not in DTYPES or logits.stride(1) != 1:
        logits = logits.float().contiguous()
    count, vocab = logits.shape
    best = torch.empty(count, k, dtype=torch.int32)
    first = torch.empty(count, dtype=torch.int64)
    _library().top_k_rows(
        logits.data_ptr(),
        count,
        logits.stride(0),
        vocab,
        k,
        logits.dtype == torch.bfloat16,
        torch.get_num_threads(),
        best.data_ptr(),
        first.data_ptr(),
    )
    return best, first


def walk(
    sampled: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    *,
    trees: Trees,
) -> WalkResult:
    """See `vllm_recycle.core.verification.walk`."""
    batch, length = draft_token_ids.shape[0], trees.depth + 1
    path = torch.empty(batch, length, dtype=torch.int64)
    token_ids = torch.empty(batch, length, dtype=torch.int64)
    lengths = torch.empty(batch, dtype=torch.int32)
    _library().walk(
        _pointer(sampled),
        _rows_pointer(draft_token_ids),
        draft_token_ids.stride(0),
        _pointer(cu_num_logits),
        _rows_pointer(trees.parents),
        _rows_pointer(trees.depths),
        trees.parents.stride(0),
        trees.depths.stride(0),
        batch,
        trees.num_nodes,
        length,
        path.data_ptr(),
        token_ids.data_ptr(),
        lengths.data_ptr(),
    )
    return WalkResult(path, token_ids, lengths)


def newest_phrases(table: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
    """See `vllm_recycle.core.phrase_pool.newest_phrases`."""
    _, per_token, length = table.shape
    newest = torch.empty(*token_ids.shape, count, length, dtype=torch.int64)
    token_ids = token_ids.contiguous()
    _library().newest_phrases(
        _pointer(table, torch.int32),
        _pointer(token_ids),
        token_ids.numel(),
        count,
        per_token,
        length,
        _pointer(newest),
    )
    return newest


def insert_phrases(
    table: torch.Tensor,
    token_ids: torch.Tensor,
    phrases: torch.Tensor,
    *,
    replaced: torch.Tensor | None = None,
) -> None:
    """See `vllm_recycle.core.phrase_pool.insert_phrases`."""
    _, per_token, length = table.shape
    token_ids, phrases = token_ids.contiguous(), phrases.contiguous()
    replaced = None if replaced is None else replaced.contiguous()
    _library().insert_phrases(
        _pointer(table, torch.int32),
        *_pointers(token_ids, phrases),
        _pointer(replaced),
        len(token_ids),
        per_token,
        length,
    )


def move_slots(
    kv_caches: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor, *, isa: str
) -> None:
    """See `vllm_recycle.kernels.cpu.kv_cache.move_slots`."""
    library, (first, *_) = load_library(), kv_caches
    if library is None or first.element_size() not in (2, 4):
        torch_kv_cache.move_slots(kv_caches, source, target, isa=isa)
        return
    read, write = (
        torch_kv_cache.slot_elements(slots, shape=first.shape, isa=isa)
        for slots in (source, target)
    )
    pointers = [kv_cache.data_ptr() for kv_cache in kv_caches]
    library.move_slots(
        (c_void_p * len(pointers))(*pointers),
        len(pointers),
        first.element_size(),
        *_pointers(read, write),
        read.numel(),
        torch.get_num_threads(),
    )


def has_tree_attention(dtype: torch.dtype, head_size: int, isa: str) -> bool:
    """Whether C++ attends from trees: not in float16, nor with head sizes that are no multiple of
    16, nor in the AMX layout where the compiler or the system has no AMX, nor without a compiler.
    """
    library = load_library()
    if library is None or dtype not in DTYPES or head_size % LANES:
        return False
    return isa != "amx" or bool(library.reads_amx_layout())


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
    """See `vllm_recycle.kernels.cpu.tree_attention.tree_attention`.

    That function serves where this one cannot (`has_tree_attention`).

    On x86 a row has, bit for bit, what vLLM's kernel gives the decode row of its path: all is
    rounded in vLLM's order, and ancestors count where they are in a chain. In the AMX layout, whose
    products add values in pairs of slots, this is so for cached chains from the root on. Not where
    vLLM cuts a text, and its own rows part: over threads (`VLLM_CPU_ATTN_SPLIT_KV`), and by half
    the L2 cache (some 8000 tokens at 512 KiB).
    """
    _, heads, head_size = query.shape
    dtype = query.dtype
    if not has_tree_attention(dtype, head_size, isa):
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
    of_query, of_output = query.stride(), output.stride()
    assert kv_cache.dtype == output.dtype == dtype
    assert kv_cache.is_contiguous()
    assert of_query[1:] == of_output[1:] == (head_size, 1)
    assert sinks is None or len(sinks) == heads
    _, kv_heads, block_size, _ = kv_cache.shape
    given: tuple[int | None, ...] = (None, 0, None, 0)
    if own is not None:
        for side in own:
            assert side.dtype == dtype
            assert side.stride()[1:] == (head_size, 1)
        given = tuple(of for side in own for of in (side.data_ptr(), side.stride(0)))
    sinks = None if sinks is None else sinks.float()
    _library().tree_attention(
        _queries(trees),
        query.data_ptr(),
        of_query[0],
        output.data_ptr(),
        of_output[0],
        kv_cache.data_ptr(),
        *given,
        _pointer(sinks, torch.float32),
        heads,
        kv_heads,
        head_size,
        block_size,
        NO_WINDOW if window is None else window,
        isa == "amx",
        dtype == torch.bfloat16,
        scale,
        torch.get_num_threads(),
    )
