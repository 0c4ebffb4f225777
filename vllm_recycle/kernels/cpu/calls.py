"""Calling the C++ kernels with tensors, as the torch functions that they are twins of are called.

This module satisfies `vllm_recycle.core.operations.Operations`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_double, c_int64, c_void_p
from itertools import islice
from typing import Any

import torch

from vllm_recycle.core.adjacency import MAX_CONTEXT, AdjacencyMatrix, Ends
from vllm_recycle.core.choose import Price
from vllm_recycle.core.copies import Copies
from vllm_recycle.core.curve import CHAINS, TREES
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grammar import Allowed, Grammar
from vllm_recycle.core.grow import TextEnds, Trunks
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.tree import Trees, TreeTemplate
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.kernels.cpu.pointers import DTYPES, REFS, library, pointer, pointers, rows_pointer

# Numbers of a `MatrixLayout`, as `Matrix` in matrix.cpp has them.
NUMBERS = ("vocab_size", "k", "slots", "has_own", "has_shared", "parts")


class _Matrix(ctypes.Structure):
    """As `Matrix` in matrix.cpp."""

    _fields_ = (
        ("table", c_void_p),
        ("salts", c_void_p),
        ("classes", c_void_p),
        *((name, c_int64) for name in NUMBERS),
        ("num_contexts", c_int64),
        ("lengths", c_int64 * MAX_CONTEXT),
    )


def _matrix(matrix: AdjacencyMatrix) -> Any:
    """For C++."""
    if (ref := REFS.get(matrix)) is None:
        layout, table = matrix.layout, pointer(matrix.table, torch.int32)
        numbers = (*(getattr(layout, name) for name in NUMBERS), len(layout.contexts))
        salts, classes = pointer(matrix.salts), pointer(matrix.classes)
        ref = ctypes.byref(_Matrix(table, salts, classes, *numbers, layout.contexts))
        REFS[matrix] = ref
    return ref


def _numbers(values: Sequence[int]) -> Any:
    """For C++, as int64."""
    return (c_int64 * len(values))(*values)


def _ends(ends: Ends) -> tuple[Any, ...]:
    """For C++: tokens, which of them are tokens, the stride of both, and the last positions."""
    token_ids, is_token = ends.token_ids, ends.is_token
    assert token_ids.dtype == torch.int32
    assert token_ids.stride(1) == 1
    flags = None
    if is_token is not None:
        assert is_token.dtype == torch.bool
        assert is_token.stride() == token_ids.stride()
        flags = is_token.data_ptr()
    return token_ids.data_ptr(), flags, token_ids.stride(0), _numbers(ends.last_positions)


def _trunks(trunks: Trunks | None, batch: int) -> tuple[int | None, int | None, int, int]:
    """For C++: tokens, chances, gamma and choices."""
    if trunks is None:
        return None, None, 0, 0
    assert trunks.token_ids.shape == trunks.chances.shape
    assert len(trunks.token_ids) == batch
    chances = pointer(trunks.chances, torch.float64)
    _, gamma, choices = trunks.token_ids.shape
    return pointer(trunks.token_ids), chances, gamma, choices


class _Texts(ctypes.Structure):
    """As `Texts` in matrix.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("idx_mapping", "token_ids", "is_token")),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("last_positions", "max_depths", "trunk_ids", "chances")),
        ("gamma", c_int64),
        ("choices", c_int64),
        ("follows", c_void_p),
        ("ask", c_void_p),
        ("batch", c_int64),
    )


class _Template(ctypes.Structure):
    """As `Template` in matrix.cpp."""

    _fields_ = (*((name, c_void_p) for name in ("parents", "ranks", "depths")), ("nodes", c_int64))


class _Price(ctypes.Structure):
    """As `Price` in matrix.cpp."""

    _fields_ = (("seconds", c_void_p), ("num_rows", c_int64), ("trust", c_double))


class _Chosen(ctypes.Structure):
    """As `Chosen` in matrix.cpp."""

    _fields_ = (("rate", c_double), ("expected", c_double), ("kind", c_int64))


def _price(price: Price | None) -> _Price:
    """For C++."""
    if price is None:
        return _Price(None, 0, 1.0)
    return _Price(pointer(price.seconds, torch.float64), len(price.seconds), price.trust)


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
    failures: list[BaseException] = []
    last_allowed: Allowed | None = None  # C++ reads its words until it asks again

    def ask(b: int, path: Any, length: int, allowed: Any) -> None:
        nonlocal last_allowed
        try:
            grammar = grammars[b]
            last_allowed = grammar.allowed(path[:length]) if grammar else None
            if last_allowed is not None:
                words = pointer(last_allowed.words, torch.int32)
                allowed[0] = _Allowed(words, len(last_allowed.words), last_allowed.expected)
        except BaseException as error:  # ends here, below C++; a signal's too
            failures.append(error)

    yield _numbers([grammar is not None for grammar in grammars]), ASK(ask)
    if failures:
        raise failures[0]


def draft(
    matrix: AdjacencyMatrix,
    counts: torch.Tensor,
    texts: TextEnds,
    *,
    prices: Mapping[str, Price],
    max_nodes: int,
    tree: TreeTemplate | None = None,
) -> Drafts:
    """See `vllm_recycle.core.draft.draft`."""
    batch = len(texts.idx_mapping)
    assert len(texts.ends.last_positions) == len(texts.max_depths) == batch
    buffer = (c_int64 * (batch * (1 + 2 * max_nodes)))()
    template = _Template(None, None, None, 0)
    if tree is not None:
        template = _Template(*pointers(tree.parents, tree.ranks, tree.depths), tree.num_nodes)
    token_ids, is_token, stride, last_positions = _ends(texts.ends)
    depths, chosen = _numbers(texts.max_depths), _Chosen()
    with _grammars(texts.grammars) as (follows, ask):
        structure = _Texts(
            pointer(texts.idx_mapping),
            token_ids,
            is_token,
            stride,
            ctypes.addressof(last_positions),
            ctypes.addressof(depths),
            *_trunks(texts.trunks, batch),
            follows and ctypes.addressof(follows),
            ask and ctypes.cast(ask, c_void_p),
            batch,
        )
        size = library().draft(
            _matrix(matrix),
            pointer(counts, torch.float64),
            ctypes.byref(structure),
            ctypes.byref(template),
            *(ctypes.byref(_price(prices.get(kind))) for kind in (TREES, CHAINS)),
            max_nodes,
            buffer,
            ctypes.byref(chosen),
        )
    numbers = iter(buffer[:size])
    kind = CHAINS if chosen.kind else TREES
    drafts = Drafts([], [], kind=kind, rate=chosen.rate, expected=chosen.expected)
    for count in numbers:
        for lists in (drafts.token_ids, drafts.parents):
            lists.append(list(islice(numbers, count)))
    return drafts


def learn(
    matrix: AdjacencyMatrix, counts: torch.Tensor | None, ends: Ends, step: VerifiedStep
) -> None:
    """See `vllm_recycle.core.learn.learn`."""
    assert len(ends.last_positions) == len(step.idx_mapping)
    path, token_ids = step.walked.path.contiguous(), step.walked.token_ids.contiguous()
    library().learn(
        _matrix(matrix),
        pointer(counts, torch.float64),
        pointer(step.idx_mapping),
        *_ends(ends),
        rows_pointer(step.parents),
        step.parents.stride(0),
        *pointers(step.row_token_ids, step.cu_num_logits),
        pointer(step.successors, torch.int32),
        *pointers(path, token_ids),
        path.shape[1],
        len(step.idx_mapping),
    )


def seed(matrix: AdjacencyMatrix, req_state_idx: int, token_ids: torch.Tensor) -> None:
    """See `vllm_recycle.core.learn.seed`."""
    library().seed(_matrix(matrix), pointer(token_ids), len(token_ids), req_state_idx)


class _Copies(ctypes.Structure):
    """As `Copies` in copies.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("classes", "stands", "places", "matches", "counts")),
        *((name, c_int64) for name in ("length", "min_match", "is_counting")),
        *((name, c_void_p) for name in ("idx_mapping", "token_ids", "is_token")),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("last_positions", "hints", "hint_lengths")),
        ("batch", c_int64),
    )


@contextmanager
def _copies(copies: Copies, idx_mapping: torch.Tensor, ends: Ends) -> Iterator[Any]:
    """For C++."""
    no_hint = torch.empty(0, dtype=torch.int32)
    hints = [copies.hints.get(index, no_hint) for index in idx_mapping.tolist()]
    token_ids, is_token, stride, last_positions = _ends(ends)
    addresses = _numbers([hint.data_ptr() for hint in hints])
    lengths = _numbers([*map(len, hints)])
    structure = _Copies(
        *pointers(copies.acceptance.classes, copies.stands, copies.places, copies.matches),
        pointer(copies.acceptance.counts, torch.float64),
        copies.length,
        copies.min_match,
        copies.counts,
        pointer(idx_mapping),
        token_ids,
        is_token,
        stride,
        *(ctypes.addressof(numbers) for numbers in (last_positions, addresses, lengths)),
        len(hints),
    )
    yield ctypes.byref(structure)


def draft_copies(copies: Copies, idx_mapping: torch.Tensor, ends: Ends) -> Trunks:
    """See `vllm_recycle.core.copies.draft_copies`."""
    shape = len(idx_mapping), copies.length, 1
    trunks = Trunks(torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float64))
    with _copies(copies, idx_mapping, ends) as structure:
        addresses = trunks.token_ids.data_ptr(), trunks.chances.data_ptr()
        library().draft_copies(structure, *addresses)
    return trunks


def learn_copies(
    copies: Copies, idx_mapping: torch.Tensor, ends: Ends, token_ids: torch.Tensor
) -> None:
    """See `vllm_recycle.core.copies.learn_copies`."""
    token_ids = token_ids.contiguous()
    with _copies(copies, idx_mapping, ends) as structure:
        library().learn_copies(structure, pointer(token_ids), token_ids.shape[1])


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `vllm_recycle.core.learn.top_k`."""
    if logits.dtype not in DTYPES or logits.stride(1) != 1:
        logits = logits.float().contiguous()
    count, vocab = logits.shape
    top_ids = torch.empty(count, k, dtype=torch.int32)
    best_ids = torch.empty(count, dtype=torch.int64)
    library().top_k_rows(
        logits.data_ptr(),
        count,
        logits.stride(0),
        vocab,
        k,
        logits.dtype == torch.bfloat16,
        torch.get_num_threads(),
        top_ids.data_ptr(),
        best_ids.data_ptr(),
    )
    return top_ids, best_ids


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
    library().walk(
        pointer(sampled),
        rows_pointer(draft_token_ids),
        draft_token_ids.stride(0),
        pointer(cu_num_logits),
        rows_pointer(trees.parents),
        rows_pointer(trees.depths),
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
