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
from vllm_recycle.core.trunk import ChoiceAcceptance
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.kernels.triton.matrix.count import add_to_counts
from vllm_recycle.kernels.triton.matrix.find import Texts, bounded

_NUM_COUNTED = tl.constexpr(NUM_COUNTED)
_PRIOR_WEIGHT = tl.constexpr(acceptance.PRIOR_WEIGHT)
_PARTS = tl.constexpr(trunk.PARTS)
REQUESTS = 32  # that a program counts for at a time


@dataclass(frozen=True, slots=True)
class DeviceTrunks:
    """The last trunk of each request, by `req_state_idx`.

    Attributes:
        acceptance: what its choices are worth.
        token_ids: int64 [max_num_reqs, length, choices], padded with -1.
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
        choices, device = acceptance.counts.shape[1], acceptance.classes.device
        shape = (max_num_reqs, length, choices)
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
            CHOICES=self.token_ids.shape[2],
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
            CHOICES=self.token_ids.shape[2],
            LANES=triton.next_power_of_2(length),
            num_warps=1,
        )


def choose_trunks(idx_mapping: torch.Tensor, trunks: Trunks, peer: Trunks) -> Trunks:
    """The surer trunk of each request; see `core.grow.Trunks.surer`.

    Args:
        idx_mapping: integer [batch], the requests.
        trunks, peer: by `req_state_idx`; the first ones are no shorter, and have no more choices.

    Returns:
        Trunks by `req_state_idx`, float32, those of the requests alone.

    """
    _, length, choices = trunks.token_ids.shape
    _, peer_length, peer_choices = peer.token_ids.shape
    assert length >= peer_length
    assert choices <= peer_choices
    shape = (*trunks.token_ids.shape[:2], peer_choices)
    surer = Trunks(trunks.token_ids.new_empty(shape), trunks.chances.new_empty(shape))
    _choose_trunks_kernel[(len(idx_mapping),)](
        *surer,
        *trunks,
        *peer,
        idx_mapping,
        LENGTH=length,
        CHOICES=choices,
        PEER_LENGTH=peer_length,
        PEER_CHOICES=peer_choices,
        LANES=triton.next_power_of_2(length),
        num_warps=2,
    )
    return surer


@triton.jit
def _promise(
    token_ids: tl.tensor,
    chances: tl.tensor,
    place: tl.tensor,
    LENGTH: tl.constexpr,
    CHOICES: tl.constexpr,
) -> tl.tensor:
    """Tokens of a trunk that are expected to be right; a trunk that was left out has none."""
    survival = tl.full([], 1.0, tl.float32)
    promise = tl.full([], 0.0, tl.float32)
    for step in range(LENGTH):
        chance = bounded(tl.load(chances + place + step * CHOICES))
        has_token = tl.load(token_ids + place + step * CHOICES) >= 0
        survival = tl.where(has_token, survival * chance, 0.0)
        promise += survival
    return promise


@triton.jit
def _choose_trunks_kernel(
    surer_token_ids: tl.tensor,
    surer_chances: tl.tensor,
    token_ids: tl.tensor,
    chances: tl.tensor,
    peer_token_ids: tl.tensor,
    peer_chances: tl.tensor,
    idx_mapping: tl.tensor,
    LENGTH: tl.constexpr,
    CHOICES: tl.constexpr,
    PEER_LENGTH: tl.constexpr,
    PEER_CHOICES: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """A program for a request."""
    index = tl.load(idx_mapping + tl.program_id(0)).to(tl.int64)
    lane = tl.arange(0, LANES)
    place = (index * LENGTH + lane) * CHOICES
    peer_place = (index * PEER_LENGTH + lane) * PEER_CHOICES
    first, peer_first = index * LENGTH * CHOICES, index * PEER_LENGTH * PEER_CHOICES
    promise = _promise(token_ids, chances, first, LENGTH, CHOICES)
    peer_promise = _promise(peer_token_ids, peer_chances, peer_first, PEER_LENGTH, PEER_CHOICES)
    is_surer = promise >= peer_promise + tl.zeros([LANES], tl.float32)
    for choice in tl.static_range(PEER_CHOICES):
        is_ours = is_surer & (lane < LENGTH * (choice < CHOICES))
        is_peers = (is_surer == 0) & (lane < PEER_LENGTH)
        token = tl.load(token_ids + place + choice, mask=is_ours, other=-1)
        token = tl.load(peer_token_ids + peer_place + choice, mask=is_peers, other=token)
        chance = tl.load(chances + place + choice, mask=is_ours, other=0.0)
        chance = tl.load(peer_chances + peer_place + choice, mask=is_peers, other=chance)
        surer_place = (index * LENGTH + lane) * PEER_CHOICES + choice
        tl.store(surer_token_ids + surer_place, token, mask=lane < LENGTH)
        tl.store(surer_chances + surer_place, chance, mask=lane < LENGTH)


@triton.jit
def _cells(
    request_class: tl.tensor,
    probability: tl.tensor,
    choice: tl.tensor,
    CHOICES: tl.constexpr,
) -> tl.tensor:
    """Where in the counts a choice is; see `ChoiceAcceptance`."""
    product = probability * _PARTS
    product = tl.where(product == product, product, 0.0)  # rounds that warm up may read NaN
    part = tl.minimum(tl.maximum(product, 0.0), _PARTS - 1).to(tl.int32)
    return (request_class * CHOICES + choice) * _PARTS + part


@triton.jit
def chances_of(
    counts: tl.tensor, cell: tl.tensor, probability: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    """float32, the chances of choices in some cells, 0 where `mask` is not set."""
    num_right = tl.load(counts + cell * 2, mask=mask, other=0.0)
    num_seen = tl.load(counts + cell * 2 + 1, mask=mask, other=0.0)
    chance = (num_right + _PRIOR_WEIGHT * probability) / (num_seen + _PRIOR_WEIGHT)
    return tl.where(mask, chance, 0.0).to(tl.float32)


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
    CHOICES: tl.constexpr,
    CELLS: tl.constexpr,
    CELL_LANES: tl.constexpr,
    REQUESTS: tl.constexpr,
) -> None:
    """One program for all, so that it can add to the counts at its end."""
    choice = tl.arange(0, triton.next_power_of_2(CHOICES))[None, :]
    for first_lane in range(0, batch, REQUESTS):
        lane = first_lane + tl.arange(0, REQUESTS)
        is_followed = lane < batch
        index = tl.load(idx_mapping + lane, mask=is_followed, other=0).to(tl.int64)
        request_class = tl.load(classes + index, mask=is_followed, other=0)
        is_followed = is_followed & (request_class < _NUM_COUNTED)
        start = tl.load(lengths + index, mask=is_followed, other=0)
        length = tl.load(text_lengths + index, mask=is_followed, other=0)
        place = tl.full([], 0, tl.int32)
        is_followed = is_followed & (start < length)
        while (place < LENGTH) & (tl.max(is_followed.to(tl.int32), 0) > 0):
            token = tl.load(texts + index * text_stride + start + place, mask=is_followed, other=-1)
            offset = (index * LENGTH + place)[:, None] * CHOICES + choice
            is_choice = is_followed[:, None] & (choice < CHOICES)
            choice_token = tl.load(token_ids + offset, mask=is_choice, other=-1)
            probability = tl.load(probabilities + offset, mask=is_choice, other=0.0)
            has_token = choice_token >= 0
            is_right = has_token & (choice_token == token[:, None])
            cell = _cells(request_class[:, None], probability, choice, CHOICES)
            tl.atomic_add(increments + cell * 2, 1, mask=is_right, sem="relaxed")
            tl.atomic_add(increments + cell * 2 + 1, 1, mask=has_token, sem="relaxed")
            is_followed = tl.sum((is_right & (choice == 0)).to(tl.int32), axis=1) > 0
            place += 1
            is_followed = is_followed & (start + place < length)
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
    CHOICES: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """A program for a request."""
    request = tl.program_id(0).to(tl.int64)
    index = tl.load(idx_mapping + request).to(tl.int64)
    place = tl.arange(0, LANES)[:, None]
    choice = tl.arange(0, triton.next_power_of_2(CHOICES))[None, :]
    mask = (place < LENGTH) & (choice < CHOICES)
    source = request * draft_token_ids_stride + place * draft_token_ids_place_stride
    token = tl.load(draft_token_ids + source + choice, mask=mask, other=-1)
    source = request * draft_probabilities_stride + place * draft_probabilities_place_stride
    probability = tl.load(draft_probabilities + source + choice, mask=mask, other=0).to(tl.float32)
    cell = _cells(tl.load(classes + index), probability, choice, CHOICES)
    chance = chances_of(counts, cell, probability, mask & (token >= 0))
    target = (index * LENGTH + place) * CHOICES + choice
    tl.store(token_ids + target, token, mask=mask)
    tl.store(probabilities + target, probability, mask=mask)
    tl.store(chances + target, chance, mask=mask)
    tl.store(lengths + index, tl.load(text_lengths + index).to(tl.int64))
