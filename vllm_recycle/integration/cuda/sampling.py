"""Sampling at all rows of a step by vLLM's sampler, and logprobs of those that were visited."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    _iter_request_chunks,
    get_max_chunk_logits,
)

from vllm_recycle.kernels.triton.penalties import Penalties, penalise_paths
from vllm_recycle.kernels.triton.trees import DeviceTrees


def penalise_along_paths(sampler: Any, trees: DeviceTrees) -> None:
    """Let a sampler of vLLM see of each row of the requests' trees the path that leads to it."""
    state = sampler.penalties_state

    def apply(logits: torch.Tensor, context: Any) -> torch.Tensor:
        if state.use_penalty[context.idx_mapping_np].any():
            penalise_paths(
                logits,
                context.input_ids,
                context.expanded_local_pos,
                context.expanded_idx_mapping,
                parents=trees.parents,
                penalties=Penalties(
                    state.repetition_penalty.gpu,
                    state.frequency_penalty.gpu,
                    state.presence_penalty.gpu,
                    state.prompt_bin_mask,
                    state.output_bin_counts,
                ),
            )
        return logits

    state.apply = apply


def sample_rows(
    sampler: Any, logits: torch.Tensor, input_batch: Any, row_token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row, in chunks of vLLM's size, and the logits that logprobs are of.

    Args:
        sampler: vLLM's.
        logits: floating [logit rows, vocab].
        input_batch: of the step.
        row_token_ids: int64 [logit rows].

    Returns:
        int64 [logit rows], and floating [logit rows, vocab].

    """
    starts = input_batch.cu_num_logits_np
    positions = input_batch.positions[input_batch.logits_indices]
    upper_bounds = input_batch.seq_lens_cpu_upper_bound.numpy()
    processed_are_wanted = (
        sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        and sampler.get_logprobs_dims(input_batch.idx_mapping_np) is not None
    )
    sampled, processed = [], []
    for first, last in _iter_request_chunks(starts, get_max_chunk_logits(logits.shape[1])):
        rows = slice(int(starts[first]), int(starts[last]))
        token_ids, processed_logits = sampler.sample(
            logits[rows],
            input_batch.expanded_idx_mapping[rows],
            input_batch.idx_mapping[first:last],
            input_batch.idx_mapping_np[first:last],
            positions[rows],
            row_token_ids[rows],
            input_batch.expanded_local_pos[rows],
            upper_bounds[first:last],
            return_logprobs=processed_are_wanted,
        )
        sampled.append(token_ids.view(-1))
        if processed_are_wanted:
            processed.append(processed_logits)
    return _joined(sampled), _joined(processed) if processed else logits


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
    # Of all rows, since which ones were visited only the device knows; then of each path,
    # padded to one length.
    found = compute_topk_scores(
        logits,
        dims[0],
        sampled,
        logprob_token_ids_state=sampler.logprob_token_ids_state,
        expanded_idx_mapping=input_batch.expanded_idx_mapping,
        max_per_req_token_ids=dims[1],
        logits_mode=sampler.logprobs_mode in ("raw_logits", "processed_logits"),
    )
    num_reqs, length = path.shape
    rows = (input_batch.cu_num_logits[:-1, None] + path.clamp(min=0)).view(-1)
    return LogprobsTensors(
        found.logprob_token_ids[rows],
        found.logprobs[rows],
        found.selected_token_ranks[rows],
        list(range(0, num_reqs * length + 1, length)),
    )


def _joined(chunks: list[torch.Tensor]) -> torch.Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)
