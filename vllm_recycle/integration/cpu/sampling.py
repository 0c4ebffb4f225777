"""The tree walk with vLLM's own sampler, so that every sampling parameter means what it does.

Where every request is greedy and asks for nothing else, all rows are sampled at once. Any other
batch goes depth by depth: one row per request, sampled with the path so far as its output, and one
draw of a request's generator for each token that is emitted. So seeded outputs are those of
decoding without speculation. Where no parameter is kept by the place of its request in the batch,
requests that have left their tree are not sampled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    LogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata

from vllm_recycle.core.verification import NO_TOKEN, WalkResult, step_down
from vllm_recycle.integration.cpu.step_layout import StepLayout

# What vLLM's metadata have of each request, and can have of some.
BY_REQUEST = ["temperature", "top_p", "top_k", "prompt_token_ids"]
BY_REQUEST += ["frequency_penalties", "presence_penalties", "repetition_penalties"]


def rows_are_independent(metadata: SamplingMetadata) -> bool:
    """Whether each row's token is the argmax of its own logits, and nothing else is asked for."""
    return (
        metadata.all_greedy
        and metadata.no_penalties
        and _is_for_any_requests(metadata, metadata.logitsprocs.non_argmax_invariant)
    )


def _is_for_any_requests(metadata: SamplingMetadata, processors: Iterable[LogitsProcessor]) -> bool:
    """Whether nothing is asked for that is kept by the places of requests in the batch."""
    thinking = metadata.thinking_budget_state_holder
    return (
        metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and not (thinking is not None and thinking.has_tracked_requests())
        and not any(map(_is_active, processors))
    )


def _of_requests(
    metadata: SamplingMetadata, places: list[int], visiting: list[bool]
) -> SamplingMetadata:
    """The metadata of the requests at these places of the batch; those that visit a row draw."""
    drawing = {
        place: metadata.generators[i]
        for place, i in enumerate(places)
        if visiting[i] and i in metadata.generators
    }
    parts: dict[str, Any] = {}
    if len(places) < len(visiting):
        values = {name: getattr(metadata, name) for name in BY_REQUEST}
        parts = {name: None if value is None else value[places] for name, value in values.items()}
        token_ids = metadata.output_token_ids  # of none, where nothing reads them
        parts["output_token_ids"] = [token_ids[i] for i in places] if token_ids else []
    return replace(metadata, spec_token_ids=None, generators=drawing, **parts)


def _is_active(processor: LogitsProcessor) -> bool:
    """Whether a processor changes logits in this step; of an unknown one we assume it."""
    if type(processor) is MinTokensLogitsProcessor:
        return bool(processor.min_toks)
    if type(processor) is LogitBiasLogitsProcessor:
        return bool(processor.biases)
    if type(processor) is MinPLogitsProcessor:
        return bool(processor.min_p_count)
    return True


def walk_by_depth(
    logits: torch.Tensor,
    step: StepLayout,
    *,
    sampler: Callable[..., Any],
    sampling_metadata: SamplingMetadata,
    discarded: np.ndarray,
    requests: Sequence[Any],
) -> tuple[WalkResult, LogprobsTensors | None]:
    """Sample the visited row of every request, go down where a child agrees, and again.

    Args:
        logits: [logit rows, vocab], not changed.
        step: the rows and their trees.
        sampler: vLLM's.
        sampling_metadata: of the batch.
        discarded: bool [batch], requests in the middle of their prompt: nothing is drawn.
        requests: vLLM's states of the batch's requests. Their live lists of output tokens, which
            penalties and bad words read, carry the path during the walk and are as before when it
            returns.

    Returns:
        The walk, and the logprobs of [batch * path] rows where they were asked for.

    """
    reached = torch.zeros(len(discarded), step.trees.num_nodes + 1, dtype=torch.bool)
    reached[:, 0] = torch.from_numpy(~discarded)
    output_token_ids = [request.output_token_ids for request in requests]
    lengths = [len(token_ids) for token_ids in output_token_ids]
    path: list[torch.Tensor] = []
    tokens, logprobs = [], []
    selects = _is_for_any_requests(sampling_metadata, sampling_metadata.logitsprocs.all)
    try:
        while True:
            row = reached.int().argmax(dim=1).where(reached.any(dim=1), -1)  # the first one
            visiting = (row >= 0).tolist()
            is_partial = selects and path  # the roots are of all
            places = [i for i, visits in enumerate(visiting) if visits or not is_partial]
            output = sampler(
                logits=logits[(step.cu_num_logits[:-1] + row.clamp(min=0))[places]],
                sampling_metadata=_of_requests(sampling_metadata, places, visiting),
            )
            sampled = torch.full_like(row, NO_TOKEN)
            sampled[places] = output.sampled_token_ids.flatten().long()
            path.append(row)
            tokens.append(sampled.where(row >= 0, NO_TOKEN))
            logprobs.append(output.logprobs_tensors)
            reached = step_down(reached, sampled, step.drafts, trees=step.trees)
            _write_ahead(sampled, reached, requests, sampling_metadata.generators)
            if not reached.any():
                break
            for processor in sampling_metadata.logitsprocs.all:
                processor.update_state(None)
    finally:
        for token_ids, length in zip(output_token_ids, lengths, strict=True):
            del token_ids[length:]
    visited = torch.stack(path, dim=1)
    num_visited = (visited >= 0).sum(dim=1, dtype=torch.int32)
    result = WalkResult(visited, torch.stack(tokens, dim=1), num_visited)
    return result, None if logprobs[0] is None else _stacked(logprobs)


def _write_ahead(
    sampled: torch.Tensor,
    reached: torch.Tensor,
    requests: Sequence[Any],
    generators: Mapping[int, torch.Generator],
) -> None:
    """Add sampled tokens to the outputs of the requests that go down to these; some end there."""
    for i in reached.any(dim=1).nonzero().flatten().tolist():
        requests[i].output_token_ids.append(int(sampled[i]))
        # A session draws on behind its next chunk, so nothing is drawn behind an end.
        if i in generators and _ends(requests[i]):
            reached[i] = False


def _ends(request: Any) -> bool:
    """Whether vLLM's scheduler ends an output with its last token."""
    output = SimpleNamespace(
        sampling_params=request.sampling_params,
        pooling_params=None,
        output_token_ids=request.output_token_ids,
        num_output_tokens=len(request.output_token_ids),
        max_tokens=request.sampling_params.max_tokens,
        num_tokens=0,  # no session goes on behind the longest text
    )
    return check_stop(output, max_model_len=1)


def _stacked(logprobs: Sequence[LogprobsTensors]) -> LogprobsTensors:
    """Those of [batch * path] rows, of those of [batch] rows for each place of the path."""
    fields = ("logprob_token_ids", "logprobs", "selected_token_ranks")
    stacked = (torch.stack([getattr(part, name) for part in logprobs], dim=1) for name in fields)
    return LogprobsTensors(*(rows.flatten(0, 1) for rows in stacked))
