"""Our schedulers of Model Runner V2, configured by a real engine; no model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from engines import core, engine
from vllm import SamplingParams
from vllm.v1.request import Request

from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.scheduler import AsyncTreeScheduler, TreeScheduler


@contextmanager
def schedulers(
    method: dict[str, Any], table: list[tuple[int, int, int]], **settings: int
) -> Iterator[Callable[..., TreeScheduler]]:
    """Makes schedulers with the configuration of an engine, which has a table of draft sizes."""
    method = {**method, "num_speculative_tokens_per_batch_size": table}
    memory = {"block_size": 32, "kv_cache_memory_bytes": 256 << 20}
    with engine(method, **memory, **settings) as llm:
        engine_core = core(llm)
        config = engine_core.vllm_config

        def make(
            kind: type[TreeScheduler] = AsyncTreeScheduler, *, chooses: bool = False
        ) -> TreeScheduler:
            settings = replace(settings_of(config), chooses_sizes=chooses)
            config.additional_config = settings.put(config.additional_config)
            scheduler = kind(
                config,
                engine_core.scheduler.kv_cache_config,
                engine_core.structured_output_manager,
                engine_core.scheduler.block_size,
            )
            scheduler.use_v2_model_runner = True
            return scheduler

        yield make
        settings = replace(settings_of(config), chooses_sizes=False)
        config.additional_config = settings.put(config.additional_config)


def make_request(name: str, token_ids: list[int], **params: Any) -> Request:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, **params)
    sampling.update_from_generation_config({}, 2)
    return Request(name, token_ids, sampling, None)
