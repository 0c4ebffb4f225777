"""Trunks on the device: what followed the last ones, and the chances of new ones.

The counts are those of `core.trunk.ChoiceAcceptance`. A step adds to them as `matrix.count` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_recycle.core import acceptance, trunk
from vllm_recycle.core.adjacency import NUM_COUNTED
from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.trunk import CHOICES, ChoiceAcceptance
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.kernels.triton.matrix.count import add_to_counts
from vllm_recycle.kernels.triton.matrix.find import Texts

_NUM_COUNTED = tl.constexpr(NUM_COUNTED)
_PRIOR_WEIGHT = tl.constexpr(acceptance.PRIOR_WEIGHT)
_CHOICES, _PARTS = tl.constexpr(CHOICES), tl.constexpr(trunk.PARTS)
_CHOICE_LANES = tl.constexpr(triton.next_power_of_2(CHOICES))
REQUESTS = 32  # that a program counts for at a time


@dataclass(frozen=True, slots=True)
class DeviceTrunks:
    """The last trunk of each request, by `req_state_idx`.

    Attributes:
        acceptance: what its choices are worth.
        token_ids: int64 [max_num_reqs, length, CHOICES], padded with -1.
        probabilities: float32, that a model gave them.
        chances: float32, that they are right.
        lengths: int64 [max_num_reqs], of the text that each was drafted behind.
        increments: int32, as the counts, of the step; zero between steps.

    """

    acceptance: ChoiceAcceptance
    token_ids: torch.Tensor
    probabilities: torch.Tensor
    chances: torch.Tensor
    lengths: torch.Tensor
    increments: torch.Tensor

    @classmethod
    def empty(cls, max_num_reqs: int, length: int, acceptance: ChoiceAcceptance) -> DeviceTrunks:
        shape, device = (max_num_reqs, length, CHOICES), acceptance.classes.device
        return cls(
            acceptance,
            torch.full(shape, NO_TOKEN, dtype=torch.int64, device=device),
            torch.zeros(shape, device=device),
            torch.zeros(shape, device=device),
            torch.zeros(max_num_reqs, dtype=torch.int64, device=device),
            torch.zeros(acceptance.counts.shape, dtype=torch.int32, device=device),
        )

    def count(self, idx_mapping: torch.Tensor, texts: Texts) -> None:
        """Count what followed the trunks of some requests, int64 [batch]."""
        counts = self.acceptance.counts
        num_cells = counts[..., 0].numel()
        _count_trunks_kernel[(1,)](
            counts,
            self.increments,
            self.acceptance.classes,
            self.token_ids,
            self.probabilities,
            self.lengths,
            texts.token_ids,
            texts.lengths,
            idx_mapping,
            len(idx_mapping),
            texts.token_ids.stride(0),
            LENGTH=self.token_ids.shape[1],
            HAS_PROBABILITIES=self.acceptance.has_probabilities,
            CELLS=num_cells,
            CELL_LANES=triton.next_power_of_2(num_cells),
            REQUESTS=REQUESTS,
            num_warps=4,
        )

    def take(self, idx_mapping: torch.Tensor, texts: Texts, trunks: Trunks) -> None:
        """Take in trunks of some requests, int64 [batch], with probabilities for chances."""
        token_ids, probabilities = trunks
        length = self.token_ids.shape[1]
        _take_trunks_kernel[(len(idx_mapping),)](
            self.acceptance.counts,
            self.acceptance.classes,
            self.token_ids,
            self.probabilities,
            self.chances,
            self.lengths,
            texts.lengths,
            idx_mapping,
            token_ids,
            probabilities,
            token_ids.stride(0),
            token_ids.stride(1),
            probabilities.stride(0),
            probabilities.stride(1),
            LENGTH=length,
            LANES=triton.next_power_of_2(length),
            HAS_PROBABILITIES=self.acceptance.has_probabilities,
            num_warps=1,
        )


@triton.jit
def _cells(
    request_class: tl.tensor,
    probability: tl.tensor,
    place: tl.tensor,
    choice: tl.tensor,
    HAS_PROBABILITIES: tl.constexpr,
) -> tl.tensor:
    """Where in the counts a choice is; see `ChoiceAcceptance`."""
    if HAS_PROBABILITIES:
        product = probability * _PARTS
        product = tl.where(product == product, product, 0.0)  # rounds that warm up may read NaN
        part = tl.minimum(tl.maximum(product, 0.0), _PARTS - 1).to(tl.int32)
    else:
        part = tl.minimum(place, _PARTS - 1)
    return (request_class * _CHOICES + choice) * _PARTS + part


@triton.jit(do_not_specialize=["batch"])
def _count_trunks_kernel(
    counts: tl.tensor,
    increments: tl.tensor,
    classes: tl.tensor,
    token_ids: tl.tensor,
    probabilities: tl.tensor,
    lengths: tl.tensor,
    texts: tl.tensor,
    text_lengths: tl.tensor,
    idx_mapping: tl.tensor,
    batch: int,
    text_stride: int,
    LENGTH: tl.constexpr,
    HAS_PROBABILITIES: tl.constexpr,
    CELLS: tl.constexpr,
    CELL_LANES: tl.constexpr,
    REQUESTS: tl.constexpr,
) -> None:
    """One program for all, so that it can add to the counts at its end."""
    choice = tl.arange(0, _CHOICE_LANES)[None, :]
    for first_lane in range(0, batch, REQUESTS):
        lane = first_lane + tl.arange(0, REQUESTS)
        is_followed = lane < batch
        index = tl.load(idx_mapping + lane, mask=is_followed, other=0).to(tl.int64)
        request_class = tl.load(classes + index, mask=is_followed, other=0)
        is_followed = is_followed & (request_class < _NUM_COUNTED)
        start = tl.load(lengths + index, mask=is_followed, other=0)
        length = tl.load(text_lengths + index, mask=is_followed, other=0)
        for place in range(LENGTH):
            is_followed = is_followed & (start + place < length)
            token = tl.load(texts + index * text_stride + start + place, mask=is_followed, other=-1)
            offset = (index * LENGTH + place)[:, None] * _CHOICES + choice
            is_choice = is_followed[:, None] & (choice < _CHOICES)
            choice_token = tl.load(token_ids + offset, mask=is_choice, other=-1)
            probability = tl.load(probabilities + offset, mask=is_choice, other=0.0)
            has_token = choice_token >= 0
            is_right = has_token & (choice_token == token[:, None])
            cell = _cells(request_class[:, None], probability, place, choice, HAS_PROBABILITIES)
            tl.atomic_add(increments + cell * 2, 1, mask=is_right, sem="relaxed")
            tl.atomic_add(increments + cell * 2 + 1, 1, mask=has_token, sem="relaxed")
            is_followed = tl.sum((is_right & (choice == 0)).to(tl.int32), axis=1) > 0
    tl.debug_barrier()
    cell = tl.arange(0, CELL_LANES)
    is_cell = cell < CELLS
    num_right = tl.load(increments + cell * 2, mask=is_cell, other=0)
    num_seen = tl.load(increments + cell * 2 + 1, mask=is_cell, other=0)
    add_to_counts(counts + cell * 2, num_right, num_seen, is_cell)
    tl.store(increments + cell * 2, 0, mask=is_cell)
    tl.store(increments + cell * 2 + 1, 0, mask=is_cell)


@triton.jit
def _take_trunks_kernel(
    counts: tl.tensor,
    classes: tl.tensor,
    token_ids: tl.tensor,
    probabilities: tl.tensor,
    chances: tl.tensor,
    lengths: tl.tensor,
    text_lengths: tl.tensor,
    idx_mapping: tl.tensor,
    draft_token_ids: tl.tensor,
    draft_probabilities: tl.tensor,
    draft_token_ids_stride: int,
    draft_token_ids_place_stride: int,
    draft_probabilities_stride: int,
    draft_probabilities_place_stride: int,
    LENGTH: tl.constexpr,
    LANES: tl.constexpr,
    HAS_PROBABILITIES: tl.constexpr,
) -> None:
    """A program for a request."""
    request = tl.program_id(0).to(tl.int64)
    index = tl.load(idx_mapping + request).to(tl.int64)
    place = tl.arange(0, LANES)[:, None]
    choice = tl.arange(0, _CHOICE_LANES)[None, :]
    mask = (place < LENGTH) & (choice < _CHOICES)
    source = request * draft_token_ids_stride + place * draft_token_ids_place_stride
    token = tl.load(draft_token_ids + source + choice, mask=mask, other=-1)
    source = request * draft_probabilities_stride + place * draft_probabilities_place_stride
    probability = tl.load(draft_probabilities + source + choice, mask=mask, other=0).to(tl.float32)
    cell = _cells(tl.load(classes + index), probability, place, choice, HAS_PROBABILITIES)
    num_right = tl.load(counts + cell * 2, mask=mask, other=0.0)
    num_seen = tl.load(counts + cell * 2 + 1, mask=mask, other=0.0)
    chance = (num_right + _PRIOR_WEIGHT * probability) / (num_seen + _PRIOR_WEIGHT)
    chance = tl.where(token >= 0, chance, 0.0)
    target = (index * LENGTH + place) * _CHOICES + choice
    tl.store(token_ids + target, token, mask=mask)
    tl.store(probabilities + target, probability, mask=mask)
    tl.store(chances + target, chance.to(tl.float32), mask=mask)
    tl.store(lengths + index, tl.load(text_lengths + index).to(tl.int64))
