"""Sampling at all rows of a step by vLLM's sampler, and logprobs of those that were visited."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    _iter_request_chunks,
    get_max_chunk_logits,
)

from vllm_recycle.kernels.triton.penalties import Penalties, penalise_paths
from vllm_recycle.kernels.triton.trees import DeviceTrees


def penalise_along_paths(sampler: Any, trees: DeviceTrees) -> None:
    """Let the penalties of vLLM's sampler see the path that leads to each row of a tree."""
    for state in sampler.logits_processors:
        if isinstance(state, PenaltiesState):
            state.apply = partial(_penalise, state, trees)


def _penalise(
    state: PenaltiesState, trees: DeviceTrees, logits: torch.Tensor, context: Any
) -> torch.Tensor:
    if state.use_penalty[context.idx_mapping_np].any():
        rows = context.input_ids, context.expanded_local_pos, context.expanded_idx_mapping
        penalties = Penalties(
            state.repetition_penalty.gpu,
            state.frequency_penalty.gpu,
            state.presence_penalty.gpu,
            state.prompt_bin_mask,
            state.output_bin_counts,
        )
        penalise_paths(logits, *rows, parents=trees.parents, penalties=penalties)
    return logits


def sample_rows(
    sampler: Any,
    logits: torch.Tensor,
    input_batch: Any,
    row_token_ids: torch.Tensor,
    best_token_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row, in chunks of vLLM's size, and the logits that logprobs are of.

    Args:
        sampler: vLLM's.
        logits: floating [logit rows, vocab].
        input_batch: of the step.
        row_token_ids: int64 [logit rows].
        best_token_ids: integer [logit rows], the most probable tokens, where they are known: of a
            batch that is greedy and no more these are it.

    Returns:
        int64 [logit rows], and floating [logit rows, vocab].

    """
    requests = input_batch.idx_mapping_np
    is_greedy = not (
        sampler.needs_logits_processing[requests].any()
        or sampler.sampling_states.temperature.np[requests].any()
    )
    if best_token_ids is not None and is_greedy:
        return best_token_ids.long(), logits
    starts = input_batch.cu_num_logits_np
    positions = input_batch.positions[input_batch.logits_indices]
    upper_bounds = input_batch.seq_lens_cpu_upper_bound.numpy()
    wants_processed_logits = (
        sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        and sampler.get_logprobs_dims(input_batch.idx_mapping_np) is not None
    )
    token_chunks, logits_chunks = [], []
    for start, end in _iter_request_chunks(starts, get_max_chunk_logits(logits.shape[1])):
        rows = slice(int(starts[start]), int(starts[end]))
        token_ids, processed_logits = sampler.sample(
            logits[rows],
            input_batch.expanded_idx_mapping[rows],
            input_batch.idx_mapping[start:end],
            input_batch.idx_mapping_np[start:end],
            positions[rows],
            row_token_ids[rows],
            input_batch.expanded_local_pos[rows],
            upper_bounds[start:end],
            return_logprobs=wants_processed_logits,
        )
        token_chunks.append(token_ids.view(-1))
        if wants_processed_logits:
            logits_chunks.append(processed_logits)
    return _joined(token_chunks), _joined(logits_chunks) if logits_chunks else logits


def logprobs_of_paths(
    sampler: Any,
    logits: torch.Tensor,
    input_batch: Any,
    sampled: torch.Tensor,
    path: torch.Tensor,
) -> LogprobsTensors | None:
    """Of the visited rows, where a request asked for them.

    Args:
        sampler: vLLM's.
        logits: floating [logit rows, vocab], what they are of.
        input_batch: of the step.
        sampled: int64 [logit rows].
        path: int64 [num_reqs, path], the visited rows of each tree, padded with -1.

    """
    dims = sampler.get_logprobs_dims(input_batch.idx_mapping_np)
    if dims is None:
        return None
    # Which rows were visited only the device knows: paths are padded to one length, at most that
    # of a chain of the most nodes. Where that makes more rows than there are, these are scored.
    path = path[:, : 1 + int(input_batch.num_draft_tokens_per_req.max())]
    num_reqs, length = path.shape
    rows = (input_batch.cu_num_logits[:-1, None] + path.clamp(min=0)).view(-1)
    sources, places = (rows, slice(None)) if len(rows) < len(logits) else (slice(None), rows)
    scores = compute_topk_scores(
        logits[sources],
        dims[0],
        sampled[sources],
        logprob_token_ids_state=sampler.logprob_token_ids_state,
        expanded_idx_mapping=input_batch.expanded_idx_mapping[sources],
        max_per_req_token_ids=dims[1],
        logits_mode=sampler.logprobs_mode in ("raw_logits", "processed_logits"),
    )
    return LogprobsTensors(
        scores.logprob_token_ids[places],
        scores.logprobs[places],
        scores.selected_token_ranks[places],
        list(range(0, num_reqs * length + 1, length)),
    )


def _joined(chunks: list[torch.Tensor]) -> torch.Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)
