"""How our attention backends take the place of vLLM's, and which layers they refuse.

A backend is replaced only while one of our workers loads its model, so that other engines of the
process keep vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

# Backends that are replaced now, and what was in their place before, if anything.
_replaced: list[tuple[AttentionBackendEnum, str | None]] = []


@contextmanager
def override_backend(backend: AttentionBackendEnum, replacement: type) -> Iterator[None]:
    """Layers that are created meanwhile and ask for `backend` get `replacement`."""
    _replaced.append((backend, backend.get_path() if backend.is_overridden() else None))
    _register(backend, f"{replacement.__module__}.{replacement.__qualname__}")
    try:
        yield
    finally:
        _register(*_replaced.pop())


@contextmanager
def original_backend() -> Iterator[None]:
    """Layers that are created meanwhile, inside `override_backend`, get what it has replaced."""
    assert _replaced, "expected to be inside `override_backend`"
    backend, replaced_path = _replaced[-1]
    replacement = backend.get_path()
    _register(backend, replaced_path)
    try:
        yield
    finally:
        _register(backend, replacement)


def _register(backend: AttentionBackendEnum, path: str | None) -> None:
    """Put a class in the place of a backend, or none."""
    backend.clear_override()
    if path is not None:
        register_backend(backend, path)
    # The look-up is cached, so a change is not seen before the cache is cleared.
    _cached_get_attn_backend.cache_clear()


def refuse_layer(impl: Any, **features: bool) -> None:
    """Refuse a kind of layer whose masks or scores the tree path does not have.

    `impl` is vLLM's implementation of the layer; `features` further ones, and whether it has them.
    """
    refused = {
        "ALiBi": impl.alibi_slopes is not None,
        "a logits soft cap": bool(impl.logits_soft_cap),
        f"attention of type {impl.attn_type}": impl.attn_type != AttentionType.DECODER,
        **features,
    }
    for feature, present in refused.items():
        if present:
            raise NotImplementedError(
                f"vllm_recycle has no trees for {feature}; choose the tree 'chain', else "
                "start without speculation"
            )
