"""LoRA on the V1 runner, where vLLM has an adapter for each row and trees need nothing more.

But rows without an adapter must get none, and steps that are timed must have one.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from vllm_recycle.integration.start.versions import FEATURES


def keep_base_rows_plain(modules: Iterable[Any]) -> None:
    """Let the rows of requests without an adapter find zeros in a batch of others that have one.

    They have the adapter -1, which vLLM's torch kernels take for the last one. So behind the last
    comes one that is zero. Does nothing from vLLM 0.33 on, or with patches/0006. Remove when vLLM
    0.32 is dropped.

    Args:
        modules: vLLM's layers with LoRA; the second matrix of a pair is enough.

    """
    if FEATURES.skips_rows_without_adapter:
        return
    for module in modules:
        stacked = module.lora_b_stacked
        if isinstance(stacked, torch.Tensor):
            module.lora_b_stacked = _with_zeros(stacked)
        else:
            module.lora_b_stacked = tuple(map(_with_zeros, stacked))


def _with_zeros(stacked: torch.Tensor) -> torch.Tensor:
    """[adapters, ...] and an adapter more."""
    return torch.cat((stacked, torch.zeros_like(stacked[:1])))


def logits_of_an_adapter(runner: Any, requests: int, rows: int) -> AbstractContextManager[None]:
    """With LoRA, compute logits for all rows of a step as if its requests had an adapter.

    vLLM's dummy steps have one logit row per request.
    """
    num_rows = np.full(requests, rows, dtype=np.int32)
    return runner.maybe_select_dummy_loras(
        runner.lora_config, num_rows, num_sampled_tokens=num_rows, num_active_loras=1
    )
