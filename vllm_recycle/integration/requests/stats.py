"""What requests get of each step, for vLLM's metrics: counted where tokens are made to text.

Tokens behind a stop string are taken out of vLLM's counts. A histogram over requests shows which of
them drafts help; that over drafts is vLLM's own `spec_decode_num_accepted_tokens_per_pos`.
"""

from __future__ import annotations

from typing import Any

from vllm_recycle.integration.requests.parameters import is_ours

NAME = "vllm:recycle_request_accepted_tokens_per_step"
BUCKETS = [0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8]  # Ray takes none of 0


def count_step(req_state: Any, iteration_stats: Any) -> None:
    """Count a step that gave tokens to a request; vLLM has counted the tokens.

    Here and below `req_state` is vLLM's `RequestState`, and `iteration_stats` are those of all
    requests that the step gave tokens to.
    """
    req_state.iteration_stats = iteration_stats
    req_state.num_steps = getattr(req_state, "num_steps", 0) + 1


def drop_tokens(req_state: Any, num_tokens: int) -> None:
    """Take tokens of the last step, which nobody receives, out of what vLLM counted."""
    if req_state.stats is not None:  # else nothing is counted
        req_state.stats.num_generation_tokens -= num_tokens
        req_state.iteration_stats.num_generation_tokens -= num_tokens


def finish(req_state: Any, iteration_stats: Any) -> None:
    """Note what a request that has ended was given, unless its prompt's step was all of it."""
    steps = getattr(req_state, "num_steps", 0) - 1
    if steps > 0:
        accepted = req_state.stats.num_generation_tokens - 1 - steps
        iteration_stats.__dict__.setdefault("accepted_per_step", []).append(accepted / steps)


def add_histogram(stat_logger: Any) -> None:
    """Let a `PrometheusStatLogger` of vLLM's show what was noted, if its engine is ours."""
    if not is_ours(stat_logger.vllm_config.speculative_config):
        return
    histogram = stat_logger._histogram_cls(
        name=NAME,
        documentation="Accepted draft tokens of a decoding step, mean of a finished request.",
        buckets=BUCKETS,
        labelnames=["model_name", "engine"],
    )
    engine_histograms = {
        index: histogram.labels(*values)
        for index, values in stat_logger.per_engine_labelvalues.items()
    }
    record = stat_logger.record

    def record_requests(
        scheduler_stats: Any, iteration_stats: Any, *args: Any, engine_idx: int = 0, **kwargs: Any
    ) -> None:
        record(scheduler_stats, iteration_stats, *args, engine_idx=engine_idx, **kwargs)
        for accepted in getattr(iteration_stats, "accepted_per_step", ()):
            engine_histograms[engine_idx].observe(accepted)

    stat_logger.record = record_requests
