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


@contextmanager
def override_backend(backend: AttentionBackendEnum, replacement: type) -> Iterator[None]:
    """Layers that are created meanwhile and ask for `backend` get `replacement`."""
    before = backend.get_path() if backend.is_overridden() else None
    register_backend(backend, f"{replacement.__module__}.{replacement.__qualname__}")
    # The look-up is cached, so a change is not seen before the cache is cleared.
    _cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        backend.clear_override()
        if before is not None:
            register_backend(backend, before)
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
                "leave out --speculative-config"
            )
