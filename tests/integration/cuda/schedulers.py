"""Schedulers that are configured by a real engine; no model runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_recycle.core.curve import TREES, Load
from vllm_recycle.integration.schedule.draft_sizes import DraftSizes


def make_scheduler(engine_core: Any, kind: type[Scheduler]) -> Any:
    """One with the configuration of the engine."""
    scheduler = kind(
        engine_core.vllm_config,
        engine_core.scheduler.kv_cache_config,
        engine_core.structured_output_manager,
        engine_core.scheduler.block_size,
    )
    # Where steps are scheduled ahead.
    scheduler.use_v2_model_runner = issubclass(kind, AsyncScheduler)
    return scheduler


def make_request(name: str, token_ids: list[int], **params: Any) -> Request:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, **params)
    sampling.update_from_generation_config({}, 2)
    return Request(name, token_ids, sampling, None)


def seconds_as_measured(sizes: DraftSizes, output: Any) -> float | None:
    """In the place of `DraftSizes._seconds`: steps take what was measured of them."""
    requests = len(output.num_scheduled_tokens)
    if sizes.chooser is None or not requests:
        return None
    rows = np.array([output.total_num_scheduled_tokens])
    [seconds] = sizes.chooser.curve.measured(TREES, Load(requests), rows)
    return float(seconds) if np.isfinite(seconds) else None
