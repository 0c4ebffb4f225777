"""What requests get of each step, for vLLM's metrics: counted where tokens are made to text.

Tokens behind a stop string are taken out of vLLM's counts. A histogram over requests shows which of
them drafts help; that over drafts is vLLM's own `spec_decode_num_accepted_tokens_per_pos`.
"""

from __future__ import annotations

from typing import Any

from vllm_recycle.integration.requests.parameters import is_ours

NAME = "vllm:recycle_request_accepted_tokens_per_step"
BUCKETS = [0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8]  # Ray takes none of 0


def count_step(original: Any, processor: Any, req_state: Any, output: Any, *args: Any) -> None:
    """As vLLM counts a step; and how many gave tokens to a request.

    Here and below `original` is vLLM's function, and `req_state` its `RequestState`. The last of
    `args` are the counts of all requests that the step gave tokens to.
    """
    original(processor, req_state, output, *args)
    if args[-1] is not None and output.new_token_ids:
        req_state.iteration_stats = args[-1]
        req_state.num_steps = getattr(req_state, "num_steps", 0) + 1


def trim(original: Any, _: Any, req_state: Any, output: Any, num_prev_tokens: int) -> None:
    """As vLLM drops tokens that nobody receives; and takes them out of what it counted."""
    num_tokens = len(output.new_token_ids)
    original(req_state, output, num_prev_tokens)  # static: without `self`
    if req_state.stats is not None:  # else nothing is counted
        num_dropped = num_tokens - len(output.new_token_ids)
        req_state.stats.num_generation_tokens -= num_dropped
        req_state.iteration_stats.num_generation_tokens -= num_dropped


def finish(original: Any, processor: Any, req_state: Any, reason: Any, counts: Any) -> None:
    """As vLLM; and note what a request was given, unless its prompt's step was all of it."""
    steps = getattr(req_state, "num_steps", 0) - 1
    if counts is not None and steps > 0:
        accepted = req_state.stats.num_generation_tokens - 1 - steps
        counts.__dict__.setdefault("accepted_per_step", []).append(accepted / steps)
    original(processor, req_state, reason, counts)


def add_histogram(original: Any, stat_logger: Any, *args: Any, **kwargs: Any) -> None:
    """Let a `PrometheusStatLogger` of vLLM's show what was noted, if its engine is ours."""
    original(stat_logger, *args, **kwargs)
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
