"""Penalties at the rows of trees: the text of a row ends with the tokens of its path.

vLLM's kernel takes all rows before a row for its ancestors, as they are in a chain, where this one
gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK = 4096  # of the vocabulary, of one program


class Penalties(NamedTuple):
    """What vLLM keeps of each request, by `req_state_idx`.

    Attributes:
        repetition, frequency, presence: float32 [max_num_reqs].
        prompt_bits: int32 [max_num_reqs, words], bit t % 32 of word t // 32 where the prompt has
            token t.
        output_counts: int32 [max_num_reqs, vocab], how often the output has each token.

    """

    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    prompt_bits: torch.Tensor
    output_counts: torch.Tensor


def penalise_paths(
    logits: torch.Tensor,
    row_token_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    *,
    parents: torch.Tensor,
    penalties: Penalties,
) -> None:
    """Penalise what the prompt, the output or the path to a row has.

    Args:
        logits: floating [logit rows, vocab], with stride 1 along it; changed in place.
        row_token_ids: int64 [logit rows], those of whole requests, one behind the other.
        expanded_local_pos: int32 [logit rows], the row of its tree that each is, 0 for a root.
        expanded_idx_mapping: integer [logit rows], whose row each is.
        parents: int32 [max_num_reqs, rows], of the trees of all requests.
        penalties: of all requests.

    """
    num_rows, vocab_size = logits.shape
    _penalise_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
        logits,
        logits.stride(0),
        row_token_ids.contiguous(),
        expanded_local_pos.contiguous(),
        expanded_idx_mapping.contiguous(),
        parents,
        parents.stride(0),
        *penalties,
        penalties.prompt_bits.stride(0),
        penalties.output_counts.stride(0),
        vocab_size,
        BLOCK=BLOCK,
    )


# Of chunks of a step, which may begin anywhere.
@triton.jit(
    do_not_specialize_on_alignment=["row_token_ids", "expanded_local_pos", "expanded_idx_mapping"]
)
def _penalise_kernel(
    logits: tl.tensor,
    logits_stride: int,
    row_token_ids: tl.tensor,
    expanded_local_pos: tl.tensor,
    expanded_idx_mapping: tl.tensor,
    parents: tl.tensor,
    parents_stride: int,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    prompt_bits: tl.tensor,
    output_counts: tl.tensor,
    prompt_stride: int,
    output_stride: int,
    vocab_size: int,
    BLOCK: tl.constexpr,
) -> None:
    """A program serves a block of the vocabulary at a row."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(expanded_idx_mapping + row).to(tl.int64)
    repetition_penalty = tl.load(repetition + request)
    frequency_penalty = tl.load(frequency + request)
    presence_penalty = tl.load(presence + request)
    if (repetition_penalty == 1.0) & (frequency_penalty == 0.0) & (presence_penalty == 0.0):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab_size
    counts = tl.load(output_counts + request * output_stride + token, mask=mask, other=0)
    node = tl.load(expanded_local_pos + row)
    root = row - node
    while node > 0:
        counts += (tl.load(row_token_ids + root + node) == token).to(tl.int32)
        parent = tl.load(parents + request * parents_stride + node)
        tl.device_assert(parent < node, "a parent behind its child")
        node = parent
    word = tl.load(prompt_bits + request * prompt_stride + token // 32, mask=mask, other=0)
    is_prompt_token = ((word >> (token % 32)) & 1) != 0
    is_output_token = counts > 0
    pointer = logits + row * logits_stride + token
    value = tl.load(pointer, mask=mask, other=0).to(tl.float32)
    factor = tl.where(is_prompt_token | is_output_token, repetition_penalty, 1.0)
    value *= tl.where(value > 0, 1.0 / factor, factor)
    value -= frequency_penalty * counts
    value -= presence_penalty * is_output_token
    tl.store(pointer, value, mask=mask)
