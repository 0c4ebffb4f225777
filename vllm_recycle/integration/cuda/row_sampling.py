"""Sampling at the rows of trees that can be visited, where that is cheaper than at all.

With sampling parameters vLLM's sampler copies the logits of a row and passes over them again and
again: some 30 bytes a logit, 310 MB for 81 rows of a vocabulary of 128k. Going down level by level
would pass over the visited rows alone, but in ten launches a level, each as long for one row as for
a hundred, since a row is one program's. So rows are chosen here first, in one launch, and what is
chosen is sampled at once. Which rows these are has no part in what is sampled: `visitable_rows`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_recycle.kernels.triton.trees import DeviceTrees
from vllm_recycle.kernels.triton.visitable_rows import choose_rows

# Of a request; a walk visits one a level.
MOST_ROWS = 16
# The part of the rows that has to be saved, for the seven small launches that it takes.
LEAST_SAVED = 1 / 2


def wants_processed(sampler: Any, input_batch: Any) -> bool:
    """Whether logprobs are of logits that sampling parameters have changed."""
    return (
        sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        and sampler.get_logprobs_dims(input_batch.idx_mapping_np) is not None
    )


def pays(sampler: Any, logits: torch.Tensor, input_batch: Any) -> bool:
    """Whether a step's rows are to be chosen.

    Greedy tokens, and those that are sampled from the logits as they are, take one pass.
    """
    num_rows, vocab_size = logits.shape
    num_chosen = MOST_ROWS * input_batch.num_reqs
    return (
        num_chosen <= min((1 - LEAST_SAVED) * num_rows, get_max_chunk_logits(vocab_size))
        and bool(sampler.needs_logits_processing[input_batch.idx_mapping_np].any())
        and not wants_processed(sampler, input_batch)
    )


def sample_visitable_rows(
    sampler: Any,
    logits: torch.Tensor,
    input_batch: Any,
    row_token_ids: torch.Tensor,
    *,
    successors: torch.Tensor,
    draft_token_ids: torch.Tensor,
    trees: DeviceTrees,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row that a walk may visit.

    Args:
        sampler: vLLM's.
        logits: floating [logit rows, vocab].
        input_batch: of the step.
        row_token_ids: int64 [logit rows].
        successors: int32 [logit rows, k], the most probable tokens, best first.
        draft_token_ids: int64 [max_num_reqs, nodes].
        trees: of all requests.

    Returns:
        int64 [logit rows], 0 where nothing was sampled; and int64 [batch, nodes], the drafts that
        may be followed, -1 elsewhere.

    """
    states, idx_mapping_np = sampler.sampling_states, input_batch.idx_mapping_np
    chosen, drafts = choose_rows(
        logits,
        successors,
        draft_token_ids,
        trees=trees,
        idx_mapping=input_batch.idx_mapping,
        cu_num_logits=input_batch.cu_num_logits,
        positions=input_batch.positions,
        logits_indices=input_batch.logits_indices,
        temperatures=states.temperature.gpu,
        seeds=states.seeds.gpu,
        noised_argmax=gumbel_noised_argmax,
        use_fp64=sampler.use_fp64_gumbel,
        most=MOST_ROWS,
    )
    rows = chosen.view(-1)
    expanded_idx_mapping = input_batch.expanded_idx_mapping[rows]
    positions = input_batch.positions[input_batch.logits_indices[rows]]
    processed = sampler.apply_sampling_params(
        logits[rows],
        expanded_idx_mapping,
        input_batch.idx_mapping,
        idx_mapping_np,
        positions,
        row_token_ids[rows],
        input_batch.expanded_local_pos[rows],
        input_batch.seq_lens_cpu_upper_bound.numpy(),
    )
    # Never by FlashInfer: its noise is not that which the rows were chosen by.
    token_ids, _ = sampler._sample_random(
        processed, expanded_idx_mapping, idx_mapping_np, positions, None, None, False
    )
    # The root fills up, with the same token each time.
    return row_token_ids.new_zeros(len(logits)).scatter_(0, rows, token_ids), drafts
