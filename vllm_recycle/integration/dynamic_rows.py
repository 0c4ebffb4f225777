"""The context rows of an engine, from its configuration."""

from __future__ import annotations

from typing import Any

import torch

from vllm_recycle.core.dynamic import ContextRows
from vllm_recycle.core.dynamic.context_rows import slots_in
from vllm_recycle.integration.engine_config import get_options
from vllm_recycle.integration.options import TokenRecyclingOptions


def make_context_rows(vllm_config: Any, device: torch.device | str) -> ContextRows:
    """An empty table of the sizes and the scope that the options ask for."""
    options = get_options(vllm_config)
    assert isinstance(options, TokenRecyclingOptions)
    assert options.context_mib is not None  # of grown trees
    return ContextRows(
        vllm_config.model_config.get_vocab_size(),
        options.k,
        contexts=options.contexts,
        slots=slots_in(options.context_mib, options.k),
        scope=options.scope,  # type: ignore[arg-type]
        hot_start=options.hot_start,
        max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
        device=device,
    )
