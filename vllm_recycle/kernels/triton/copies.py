"""Copies on the device: the twin of `core.copies`, in one launch beside the one that counts.

A program serves a request: it takes in what followed the last trunk, searches the text, block by
block, and writes the trunk. Every rank computes the same, and the host waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_recycle.core import copies
from vllm_recycle.core.copies import FIRST_PART, Copies
from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.kernels.triton.matrix.find import Texts
from vllm_recycle.kernels.triton.trunks import DeviceTrunks, chances_of

_MAX_MATCH, _MIN_MATCH = tl.constexpr(copies.MAX_MATCH), tl.constexpr(copies.MIN_MATCH)
_NEAR, _MIN_COPY = tl.constexpr(copies.NEAR), tl.constexpr(copies.MIN_COPY)
_FIRST_PART, _PARTS = tl.constexpr(FIRST_PART), tl.constexpr(copies.PARTS)
# A place, as a key that is greater the better it is: its match, how near it is, and itself.
_PLACE_BITS = tl.constexpr(28)
_LAST_PLACE = tl.constexpr((1 << 28) - 1)
BLOCK = 4096  # of a text, that is searched at once
# Tokens of matches that are read at once, none of which waits for another.
_AHEAD = tl.constexpr(8)


@dataclass(frozen=True, slots=True)
class DeviceCopies:
    """The copies of an engine, without hints; and the last trunk of each request."""

    copies: Copies
    trunks: DeviceTrunks

    @classmethod
    def empty(cls, copies: Copies) -> DeviceCopies:
        max_num_reqs = len(copies.stands)
        return cls(copies, DeviceTrunks.empty(max_num_reqs, copies.length, copies.acceptance))

    def begin(self, indices: torch.Tensor) -> None:
        """Requests start, int64 [n]."""
        for values in (self.copies.stands, self.copies.places, self.trunks.token_ids):
            values.index_fill_(0, indices, NO_TOKEN)

    def draft(self, idx_mapping: torch.Tensor, texts: Texts) -> Trunks:
        """Take in what followed the last trunks of some requests, and draft new ones.

        Args:
            idx_mapping: integer [batch].
            texts: by `req_state_idx`.

        Returns:
            The trunks of all requests, by `req_state_idx`.

        """
        state, trunks = self.copies, self.trunks
        if state.counts:
            trunks.count(idx_mapping, texts)
        _draft_copies_kernel[(len(idx_mapping),)](
            state.stands,
            state.places,
            state.matches,
            state.acceptance.counts,
            state.acceptance.classes,
            trunks.token_ids,
            trunks.probabilities,
            trunks.chances,
            trunks.lengths,
            texts.token_ids,
            texts.lengths,
            idx_mapping,
            texts.token_ids.stride(0),
            LENGTH=state.length,
            LANES=triton.next_power_of_2(state.length),
            BLOCK=BLOCK,
            num_warps=8,
        )
        return Trunks(trunks.token_ids, trunks.chances)


@triton.jit
def _draft_copies_kernel(
    stands: tl.tensor,
    places: tl.tensor,
    matches: tl.tensor,
    counts: tl.tensor,
    classes: tl.tensor,
    token_ids: tl.tensor,
    probabilities: tl.tensor,
    chances: tl.tensor,
    lengths: tl.tensor,
    texts: tl.tensor,
    text_lengths: tl.tensor,
    idx_mapping: tl.tensor,
    text_stride: int,
    LENGTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program for a request."""
    index = tl.load(idx_mapping + tl.program_id(0)).to(tl.int64)
    text = texts + index * text_stride
    length = tl.load(text_lengths + index)
    lane = tl.arange(0, LANES)
    trunk = index * LENGTH + lane
    is_place = lane < LENGTH

    old_length = tl.load(lengths + index).to(tl.int32)
    copied_token = tl.load(token_ids + trunk, mask=is_place, other=-1)
    is_known = is_place & (old_length + lane < length)
    token = tl.load(text + old_length + lane, mask=is_known, other=-1)
    is_right = (copied_token >= 0) & (copied_token == token)
    num_right = tl.min(tl.where(is_right, LANES, lane))
    last_match = tl.load(matches + index).to(tl.int32)
    is_copy = (num_right > 0) & (last_match + num_right >= _MIN_COPY)
    stand = tl.load(stands + index).to(tl.int32)
    stand = tl.where(is_copy, tl.load(places + index).to(tl.int32) + num_right, stand)

    last = length - 1
    newest_token = tl.load(text + last, mask=last >= 0, other=-1)
    best = tl.zeros([], tl.int64)
    for first in range(0, last, BLOCK):
        position = first + tl.arange(0, BLOCK)
        text_token = tl.load(text + position, mask=position < last, other=-1)
        is_match = (text_token == newest_token) & (text_token >= 0)
        match = is_match.to(tl.int32)
        depth = tl.full([], 1, tl.int32)
        while (depth < _MAX_MATCH) & (tl.max(is_match.to(tl.int32), 0) > 0):
            is_searched = is_match
            for ahead in tl.static_range(_AHEAD):
                back = depth + ahead
                is_older = is_searched & (position >= back) & (back < _MAX_MATCH)
                older_token = tl.load(text + position - back, mask=is_older, other=-1)
                end_token = tl.load(text + last - back, mask=last >= back, other=-2)
                is_match = is_match & (older_token == end_token) & (older_token >= 0)
                match += is_match.to(tl.int32)
            depth += _AHEAD
        place = position + 1
        distance = tl.where(stand >= 0, tl.abs(place - stand), length - place)
        is_near = (stand >= 0) & (distance <= _NEAR)
        fits = (match >= _MIN_MATCH) | ((match > 0) & is_near)
        key = (match.to(tl.int64) << _PLACE_BITS) | (_LAST_PLACE - distance)
        key = (key << _PLACE_BITS) | place
        best = tl.maximum(best, tl.max(tl.where(fits, key, 0), 0))

    has_place = best > 0
    place = tl.where(has_place, (best & _LAST_PLACE).to(tl.int32), -1)
    match = (best >> (2 * _PLACE_BITS)).to(tl.int32)
    is_token = is_place & has_place & (place + lane < length)
    token = tl.load(text + place + lane, mask=is_token, other=-1)
    matched = tl.minimum(match + lane, _MAX_MATCH)
    part = (matched >= 8).to(tl.int32) + (matched >= 16) + (matched >= 32) + (matched >= 64)
    part = _FIRST_PART + tl.where(matched < 4, matched - 1, 3 + part)
    probability = (part.to(tl.float32) + 0.5) / _PARTS
    probability = tl.where(is_token, probability, 0.0)
    request_class = tl.load(classes + index)
    chance = chances_of(counts, request_class * _PARTS + part, probability, is_token & (token >= 0))
    tl.debug_barrier()  # All warps have read the last trunk.
    tl.store(token_ids + trunk, token.to(tl.int64), mask=is_place)
    tl.store(probabilities + trunk, probability, mask=is_place)
    tl.store(chances + trunk, chance, mask=is_place)
    tl.store(lengths + index, length.to(tl.int64))
    tl.store(stands + index, stand.to(tl.int64))
    tl.store(places + index, place.to(tl.int64))
    tl.store(matches + index, match.to(tl.int64))
