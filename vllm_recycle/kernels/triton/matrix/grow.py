"""Growing trees on the device, in one launch: the twin of `core.grow.grow` with a beam and levels.

A program serves a request. Levels come one after another, each with one look-up that waits for
memory; within a level a lane looks up an entry, and all successors are sorted at once. The topology
that comes out is data for the kernels of the next step: nothing on the host waits for it, so that
this can be part of a captured graph. Every rank computes the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_recycle.core.adjacency import AdjacencyMatrix
from vllm_recycle.core.grow import Trunks
from vllm_recycle.kernels.triton.matrix.find import (
    Layout,
    Texts,
    bounded,
    find_entry,
    inputs_of,
    read_tail,
)
from vllm_recycle.kernels.triton.trees import DeviceTrees

_MOST = tl.constexpr(0x7FFFFFFF)


def grow(
    drafts: torch.Tensor,
    worths: torch.Tensor,
    matrix: AdjacencyMatrix,
    rates: torch.Tensor,
    idx_mapping: torch.Tensor,
    texts: Texts,
    *,
    trees: DeviceTrees,
    beam: int,
    trunks: Trunks | None = None,
    candidates_of_warp: int = 128,
) -> None:
    """Draft below the last token of each text; see `core.grow.grow`.

    Args:
        drafts: int64 [batch, nodes], written: of each node, padded with -1.
        worths: float32 [batch, nodes], written: of each node, 0 where there is none.
        matrix: what is drafted from.
        rates: float32 [classes, contexts, 2, k, 4], each from 0 to 1.
        idx_mapping: integer [batch].
        texts: by `req_state_idx`.
        trees: written where the requests' are; has the most nodes and levels of a tree.
        beam: the most nodes of a level that are expanded.
        trunks: by `req_state_idx`, float32, of at most k choices; None where there is none.
        candidates_of_warp: of a level, to sort. With fewer, warps have less to do and more waits.

    """
    (batch, nodes), layout = drafts.shape, matrix.layout
    assert nodes == trees.num_nodes
    read = inputs_of(drafts, worths, matrix, rates, idx_mapping, texts)
    # Lanes for at least as many children as a tree has nodes. No more nodes of a level than a tree
    # has have a child that is chosen.
    beam = min(beam, nodes)
    lanes = max(2, triton.next_power_of_2(nodes))
    children = triton.next_power_of_2(layout.k)
    expanded = max(triton.next_power_of_2(beam), lanes // children)
    constants = Layout.of(layout)
    size = expanded * (trees.depth * (2 * children + 1) + 2 * constants.CONTEXT_LANES)
    scratch = torch.empty(batch, size, dtype=torch.int32, device=drafts.device)
    words = trees.ancestor_bits.shape[2]
    _, gamma, choices = (0, 0, 0) if trunks is None else trunks.token_ids.shape
    assert choices <= layout.k
    _grow_kernel[(batch,)](
        drafts,
        worths,
        trees.parents,
        trees.depths,
        trees.ancestor_bits,
        scratch,
        *read,
        *(trunks or (None, None)),
        GAMMA=gamma,
        CHOICES=choices,
        NODES=nodes,
        LANES=lanes,
        WORDS=words,
        WORD_LANES=triton.next_power_of_2(words),
        BEAM=beam,
        EXPANDED=expanded,
        CHILDREN=children,
        LEVELS=trees.depth,
        SIZE=size,
        LAYOUT=constants,
        num_warps=min(8, max(1, expanded * children // candidates_of_warp)),
    )


@triton.jit
def _grow_kernel(
    drafts: tl.tensor,
    worths: tl.tensor,
    parents: tl.tensor,
    depths: tl.tensor,
    ancestor_bits: tl.tensor,
    scratch: tl.tensor,
    table: tl.tensor,
    rates: tl.tensor,
    idx_mapping: tl.tensor,
    salts: tl.tensor,
    classes: tl.tensor,
    all_token_ids: tl.tensor,
    all_token_ids_stride: int,
    lengths: tl.tensor,
    trunk_token_ids: tl.tensor | None,
    trunk_chances: tl.tensor | None,
    GAMMA: tl.constexpr,
    CHOICES: tl.constexpr,
    NODES: tl.constexpr,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_LANES: tl.constexpr,
    BEAM: tl.constexpr,
    EXPANDED: tl.constexpr,
    CHILDREN: tl.constexpr,
    LEVELS: tl.constexpr,
    SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
) -> None:
    """A program per request.

    Child `rank` of the node that lane `lane` of a level expands is candidate number
    (level * EXPANDED + lane) * CHILDREN + rank, in the order in which they are made. The greatest
    key has what is worth the most, and of equals the first; that of none is 0. On the trunk of a
    draft model its choices are the first ranks, and successors come behind them.
    """
    K: tl.constexpr = LAYOUT.K
    STRIDE: tl.constexpr = LAYOUT.CONTEXT_LANES  # of contexts
    index = tl.program_id(0).to(tl.int64)
    request = tl.load(idx_mapping + index).to(tl.int64)
    salt = tl.load(salts + request)
    rates += tl.load(classes + request) * (LAYOUT.RANKS * 4)
    WIDTH: tl.constexpr = EXPANDED * CHILDREN  # of a level
    token_of = scratch + index * SIZE  # by candidate
    row_of = token_of + LEVELS * WIDTH  # by candidate, where it is chosen
    candidate_of = row_of + LEVELS * WIDTH  # by level and lane, which is expanded there
    contexts = candidate_of + LEVELS * EXPANDED  # by lane, of this level and the next one in turn
    lane = tl.arange(0, EXPANDED)
    rank = tl.arange(0, CHILDREN)[None, :]
    place = tl.arange(0, STRIDE)
    tail = read_tail(all_token_ids, all_token_ids_stride, lengths, request, LAYOUT)
    tl.store(contexts + place, tail)
    value = tl.where(lane == 0, 1.0, 0.0)
    node = tl.arange(0, LANES)
    best = tl.zeros([LANES], tl.int64)
    level = tl.full([], 0, tl.int32)
    trunk_lane = tl.full([], 0, tl.int32)  # that has the trunk's node of this level; -1 for none
    grows = level < LEVELS
    while grows:
        tl.debug_barrier()  # The contexts were written by other threads.
        context = contexts + (level % 2) * (EXPANDED * STRIDE)
        address, cell = find_entry(table, rates, context + lane * STRIDE, salt, value > 0, LAYOUT)
        real = (address >= 0)[:, None] & (rank < K)
        first = table + address * (2 + K) + 1
        successor = rank
        if GAMMA:
            choice = (request * GAMMA + tl.minimum(level, GAMMA - 1)) * CHOICES
            has_choices = (trunk_lane >= 0) & (level < GAMMA)
            has_choices = has_choices & (tl.load(trunk_token_ids + choice) >= 0)
            on_trunk = ((lane == trunk_lane) & has_choices)[:, None]
            successor = rank - tl.where(on_trunk, CHOICES, 0)
            real = real & (successor >= 0)
        token = tl.load(first[:, None] + successor, mask=real, other=-1)
        rate = (rates + cell)[:, None] + successor * 4
        chance = bounded(tl.load(rate, mask=real & (token >= 0), other=0.0))
        if GAMMA:
            is_choice = rank < CHOICES
            chosen = tl.load(trunk_token_ids + choice + rank, mask=is_choice, other=-1)
            offered = bounded(tl.load(trunk_chances + choice + rank, mask=is_choice, other=0.0))
            is_chosen = token < 0
            for other in tl.static_range(CHOICES):
                is_chosen = is_chosen | (token == tl.load(trunk_token_ids + choice + other))
            left = tl.maximum(1.0 - tl.sum(offered), 0.0)
            others = 1.0 - tl.sum(tl.where(is_chosen, chance, 0.0), 1)
            share = tl.div_rn(left, tl.maximum(tl.maximum(left, others), 1e-30))[:, None]
            chance = tl.where(on_trunk, tl.where(is_chosen, 0.0, share * chance), chance)
            chance = tl.where(on_trunk & is_choice, offered, chance)
            token = tl.where(on_trunk & is_choice, chosen.to(tl.int32), token)
        product = value[:, None] * chance
        candidate = (level * EXPANDED + lane)[:, None] * CHILDREN + rank
        key = (product.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (_MOST - candidate)
        key = tl.where((token >= 0) & (product > 0), key, 0)
        tl.store(token_of + candidate, token)
        of_level = tl.topk(tl.reshape(key, [WIDTH]), LANES)
        # The best of two sorted lists are the greater ones of one and of the other in reverse.
        best = tl.bitonic_merge(tl.maximum(best, tl.flip(of_level, 0)), descending=True)

        key_above = tl.where(lane < BEAM, tl.gather(of_level, lane, 0), 0)
        value = (key_above >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        candidate_above = _MOST - (key_above & _MOST).to(tl.int32)
        goes_on = key_above > tl.where(level + 1 < LEVELS, 0, key_above)
        tl.store(candidate_of + (level + 1) * EXPANDED + lane, candidate_above, mask=goes_on)
        if GAMMA:
            trunk = (level * EXPANDED + trunk_lane) * CHILDREN
            is_trunk = goes_on & has_choices & (candidate_above == trunk)
            trunk_lane = tl.max(tl.where(is_trunk, lane, -1))
        tl.debug_barrier()  # So were the tokens.
        newest = tl.load(token_of + candidate_above, mask=goes_on, other=-1)
        lane_above = candidate_above % WIDTH // CHILDREN
        older = tl.load(
            context + lane_above[:, None] * STRIDE + place[None, :] - 1,
            mask=goes_on[:, None] & (place > 0)[None, :],
            other=-1,
        )
        following = contexts + ((level + 1) % 2) * (EXPANDED * STRIDE)
        tl.store(
            following + lane[:, None] * STRIDE + place[None, :],
            tl.where((place == 0)[None, :], newest[:, None], older),
        )
        # No node is worth more than its parent, and of equals the earlier one stays: with as many
        # nodes as a tree may have, levels end where none of the next one could be among them.
        # A gather, not a sum of `best`: Triton 3.6 sums the wrong lanes of what a merge returns.
        last = tl.gather(best, tl.full([EXPANDED], NODES - 1, tl.int32), 0)
        level += 1
        grows = (level < LEVELS) & (tl.max((key_above >> 32) - (last >> 32), 0) > 0)

    real = (best > 0) & (node < NODES)
    candidate = _MOST - (best & _MOST).to(tl.int32)
    tl.store(row_of + candidate, node + 1, mask=real)
    tl.debug_barrier()
    token = tl.load(token_of + candidate, mask=real, other=-1)
    is_deep = real & (candidate >= WIDTH)
    above = tl.load(candidate_of + candidate // CHILDREN, mask=is_deep, other=0)
    parent = tl.load(row_of + above, mask=is_deep, other=0)
    # A parent that was not chosen would lie anywhere, and the loops over parents would not end.
    tl.device_assert((parent >= 0) & (parent <= node), "a parent behind its child")
    parent = tl.minimum(tl.maximum(parent, 0), node)
    word = tl.arange(0, WORD_LANES)[None, :]
    bits = tl.zeros([LANES, WORD_LANES], tl.int32) | (word == 0)
    row = node + 1
    for _ in range(LEVELS):
        bits = bits | tl.where((row // 32)[:, None] == word, (1 << (row % 32))[:, None], 0)
        row = tl.where(row > 0, tl.gather(parent, tl.maximum(row - 1, 0), 0), 0)

    inside = node < NODES
    value = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(drafts + index * NODES + node, token.to(tl.int64), mask=inside)
    tl.store(worths + index * NODES + node, value, mask=inside)
    below_root = request * (NODES + 1) + 1 + node
    tl.store(parents + below_root, parent, mask=inside)
    tl.store(depths + below_root, tl.where(real, candidate // WIDTH + 1, 1), mask=inside)
    tl.store(
        ancestor_bits + below_root[:, None] * WORDS + word,
        bits,
        mask=inside[:, None] & (word < WORDS),
    )
