"""Growing trees on the device, in one launch: the twin of `core.grow.grow` with a beam and levels.

A request may have a chain instead: of each level the best node.

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

_MAX_INT32 = tl.constexpr(0x7FFFFFFF)


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
    num_warps: int | None = None,
) -> None:
    """Draft below the last token of each text; see `core.grow.grow`.

    Args:
        drafts: int64 [batch, nodes], written: of each node, padded with -1.
        worths: float32 [batch, nodes], written: of each node, 0 where there is none.
        matrix: what is drafted from.
        rates: float32 [classes, contexts, 2, k, 4], each from 0 to 1.
        idx_mapping: integer [batch].
        texts: by `req_state_idx`.
        trees: written where the requests' are; has the most nodes and levels of a tree, and says
            which are chains.
        beam: the most nodes of a level that are expanded.
        trunks: by `req_state_idx`, float32, of at most k choices; None where there is none.
        num_warps: by default one for 128 candidates of a level; of more each has less to sort, and
            waits more often.

    """
    (batch, nodes), layout = drafts.shape, matrix.layout
    assert nodes == trees.num_nodes
    inputs = inputs_of(drafts, worths, matrix, rates, idx_mapping, texts)
    # Lanes for at least as many children as a tree has nodes. No more nodes of a level than a tree
    # has have a child that is chosen.
    beam = min(beam, nodes)
    lanes = max(2, triton.next_power_of_2(nodes))
    children = triton.next_power_of_2(layout.k)
    num_expanded = max(triton.next_power_of_2(beam), lanes // children)
    constants = Layout.of(layout)
    size = num_expanded * (trees.depth * (2 * children + 1) + 2 * constants.CONTEXT_LANES)
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
        trees.are_chains,
        scratch,
        *inputs,
        *(trunks or (None, None)),
        GAMMA=gamma,
        CHOICES=choices,
        NODES=nodes,
        LANES=lanes,
        WORDS=words,
        WORD_LANES=triton.next_power_of_2(words),
        BEAM=beam,
        EXPANDED=num_expanded,
        CHILDREN=children,
        LEVELS=trees.depth,
        SIZE=size,
        LAYOUT=constants,
        num_warps=num_warps or min(8, max(1, num_expanded * children // 128)),
    )


@triton.jit
def _grow_kernel(
    drafts: tl.tensor,
    worths: tl.tensor,
    parents: tl.tensor,
    depths: tl.tensor,
    ancestor_bits: tl.tensor,
    are_chains: tl.tensor,
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
    What is believed is as in `core.grow.Reader.following`.
    """
    K: tl.constexpr = LAYOUT.K
    STRIDE: tl.constexpr = LAYOUT.CONTEXT_LANES  # of contexts
    index = tl.program_id(0).to(tl.int64)
    request = tl.load(idx_mapping + index).to(tl.int64)
    salt = tl.load(salts + request)
    rates += tl.load(classes + request) * (LAYOUT.RANKS * 4)
    is_chain = tl.load(are_chains + request)
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
    best_keys = tl.zeros([LANES], tl.int64)
    level = tl.full([], 0, tl.int32)
    trunk_lane = tl.full([], 0, tl.int32)  # that has the trunk's node of this level; -1 for none
    grows = level < LEVELS
    while grows:
        tl.debug_barrier()  # The contexts were written by other threads.
        context = contexts + (level % 2) * (EXPANDED * STRIDE)
        address, cell = find_entry(table, rates, context + lane * STRIDE, salt, value > 0, LAYOUT)
        is_successor = (address >= 0)[:, None] & (rank < K)
        successors = table + address * (2 + K) + 1
        successor = rank
        if GAMMA:
            choice = (request * GAMMA + tl.minimum(level, GAMMA - 1)) * CHOICES
            has_choices = (trunk_lane >= 0) & (level < GAMMA)
            has_choices = has_choices & (tl.load(trunk_token_ids + choice) >= 0)
            is_on_trunk = ((lane == trunk_lane) & has_choices)[:, None]
            successor = rank - tl.where(is_on_trunk, CHOICES, 0)
            is_successor = is_successor & (successor >= 0)
        token = tl.load(successors[:, None] + successor, mask=is_successor, other=-1)
        rate = (rates + cell)[:, None] + successor * 4
        chance = bounded(tl.load(rate, mask=is_successor & (token >= 0), other=0.0))
        if GAMMA:
            is_choice = rank < CHOICES
            choice_token = tl.load(trunk_token_ids + choice + rank, mask=is_choice, other=-1)
            choice_rate = bounded(tl.load(trunk_chances + choice + rank, mask=is_choice, other=0.0))
            # Of a shared entry whose first token is right more often.
            is_first = (successor == 0) & (cell // (4 * K) % 2 == 0)[:, None]
            is_surer = is_first & (chance > bounded(tl.load(trunk_chances + choice)))
            believes_entry = tl.max((is_surer & is_on_trunk).to(tl.int32), 1)[:, None] > 0
            is_chosen = token < 0
            rest_rate = tl.full([EXPANDED, 1], 1.0, tl.float32)
            known_rate = tl.full([EXPANDED, CHILDREN], -1.0, tl.float32)
            for other_rank in tl.static_range(CHOICES):
                other_token = tl.load(trunk_token_ids + choice + other_rank)
                other_rate = bounded(tl.load(trunk_chances + choice + other_rank))
                is_same = (token >= 0) & (token == other_token)
                is_chosen = is_chosen | is_same
                same_rate = tl.max(tl.where(is_same, chance, -1.0), 1)[:, None]
                known_rate = tl.where(rank == other_rank, same_rate, known_rate)
                other_rate = tl.where(believes_entry, other_rate, same_rate)
                rest_rate -= tl.where(same_rate >= 0, other_rate, 0.0)
            believed_rate = tl.where(
                believes_entry, tl.sum(chance, 1)[:, None], tl.sum(choice_rate)
            )
            rest_chance = tl.maximum(1.0 - believed_rate, 0.0)
            share = tl.div_rn(rest_chance, tl.maximum(tl.maximum(rest_chance, rest_rate), 1e-30))
            shared_rate = tl.where(known_rate >= 0, known_rate, share * choice_rate)
            choice_rate = tl.where(believes_entry, shared_rate, choice_rate)
            chance = tl.where(is_on_trunk, tl.where(believes_entry, chance, share * chance), chance)
            chance = tl.where(is_on_trunk & is_chosen, 0.0, chance)
            chance = tl.where(is_on_trunk & is_choice, choice_rate, chance)
            token = tl.where(is_on_trunk & is_choice, choice_token.to(tl.int32), token)
        product = value[:, None] * chance
        candidate = (level * EXPANDED + lane)[:, None] * CHILDREN + rank
        key = (product.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (_MAX_INT32 - candidate)
        key = tl.where((token >= 0) & (product > 0), key, 0)
        tl.store(token_of + candidate, token)
        level_keys = tl.topk(tl.reshape(key, [WIDTH]), LANES)
        level_keys = tl.where(is_chain & (node > 0), 0, level_keys)
        # The best of two sorted lists are the greater ones of one and of the other in reverse.
        best_keys = tl.bitonic_merge(tl.maximum(best_keys, tl.flip(level_keys, 0)), descending=True)

        key_above = tl.where(lane < BEAM, tl.gather(level_keys, lane, 0), 0)
        value = (key_above >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        candidate_above = _MAX_INT32 - (key_above & _MAX_INT32).to(tl.int32)
        is_expanded = key_above > tl.where(level + 1 < LEVELS, 0, key_above)
        tl.store(candidate_of + (level + 1) * EXPANDED + lane, candidate_above, mask=is_expanded)
        if GAMMA:
            trunk = (level * EXPANDED + trunk_lane) * CHILDREN
            is_trunk = is_expanded & has_choices & (candidate_above == trunk)
            trunk_lane = tl.max(tl.where(is_trunk, lane, -1))
        tl.debug_barrier()  # So were the tokens.
        newest_token = tl.load(token_of + candidate_above, mask=is_expanded, other=-1)
        lane_above = candidate_above % WIDTH // CHILDREN
        older_tokens = tl.load(
            context + lane_above[:, None] * STRIDE + place[None, :] - 1,
            mask=is_expanded[:, None] & (place > 0)[None, :],
            other=-1,
        )
        next_context = contexts + ((level + 1) % 2) * (EXPANDED * STRIDE)
        tl.store(
            next_context + lane[:, None] * STRIDE + place[None, :],
            tl.where((place == 0)[None, :], newest_token[:, None], older_tokens),
        )
        # No node is worth more than its parent, and of equals the earlier one stays: with as many
        # nodes as a tree may have, levels end where none of the next one could be among them.
        # A gather, not a sum of `best_keys`: Triton 3.6 sums the wrong lanes of a merge.
        last_key = tl.gather(best_keys, tl.full([EXPANDED], NODES - 1, tl.int32), 0)
        level += 1
        grows = (level < LEVELS) & (tl.max((key_above >> 32) - (last_key >> 32), 0) > 0)

    is_node = (best_keys > 0) & (node < NODES)
    candidate = _MAX_INT32 - (best_keys & _MAX_INT32).to(tl.int32)
    tl.store(row_of + candidate, node + 1, mask=is_node)
    tl.debug_barrier()
    token = tl.load(token_of + candidate, mask=is_node, other=-1)
    is_deep = is_node & (candidate >= WIDTH)
    parent_candidate = tl.load(candidate_of + candidate // CHILDREN, mask=is_deep, other=0)
    parent = tl.load(row_of + parent_candidate, mask=is_deep, other=0)
    # A parent that was not chosen would lie anywhere, and the loops over parents would not end.
    tl.device_assert((parent >= 0) & (parent <= node), "a parent behind its child")
    parent = tl.minimum(tl.maximum(parent, 0), node)
    word = tl.arange(0, WORD_LANES)[None, :]
    bits = tl.zeros([LANES, WORD_LANES], tl.int32) | (word == 0)
    row = node + 1
    while tl.max(row, 0) > 0:
        bits = bits | tl.where((row // 32)[:, None] == word, (1 << (row % 32))[:, None], 0)
        row = tl.where(row > 0, tl.gather(parent, tl.maximum(row - 1, 0), 0), 0)

    mask = node < NODES
    value = (best_keys >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(drafts + index * NODES + node, token.to(tl.int64), mask=mask)
    tl.store(worths + index * NODES + node, value, mask=mask)
    below_root = request * (NODES + 1) + 1 + node
    tl.store(parents + below_root, parent, mask=mask)
    tl.store(depths + below_root, tl.where(is_node, candidate // WIDTH + 1, 1), mask=mask)
    tl.store(
        ancestor_bits + below_root[:, None] * WORDS + word,
        bits,
        mask=mask[:, None] & (word < WORDS),
    )
