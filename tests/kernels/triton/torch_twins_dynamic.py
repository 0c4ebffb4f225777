"""What learning on the device does to context rows: plain Python, and what is correct.

A step there learns at once, see `vllm_recycle.kernels.triton.matrix.learn`; the functions of
`core.learn` learn row by row. Both are the same where no two rows have one address.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_recycle.core.acceptance import ANY_STEADINESS, MOST_SEEN, PRIOR_WEIGHT
from vllm_recycle.core.adjacency import (
    MAX_STEADINESS,
    MatrixLayout,
    find_entry,
    is_written,
    write_entry,
)
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.kernels.triton.matrix.count import DeviceCounts

# Head but for its steadiness, salt and successors.
Write = tuple[int, int, list[int]]


def learn(
    table: torch.Tensor,
    stamps: torch.Tensor,
    counts: DeviceCounts | None,
    *,
    layout: MatrixLayout,
    idx_mapping: torch.Tensor,
    salts: torch.Tensor,
    tails: torch.Tensor,
    parents: torch.Tensor,
    row_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    successors: torch.Tensor,
    walked: WalkResult,
    max_rows: int,
    learns: torch.Tensor | None = None,
) -> None:
    """See `vllm_recycle.kernels.triton.matrix.learn.learn`."""
    assert not stamps.any()
    starts, writes = cu_num_logits.tolist(), dict[int, Write]()
    for b, req_state_idx in enumerate(idx_mapping.tolist()):
        if learns is not None and not learns[b]:
            continue
        tokens = row_token_ids[starts[b] : starts[b + 1]].tolist()
        if not tokens:
            continue
        assert len(tokens) <= max_rows
        salt, parent = int(salts[req_state_idx]), parents[req_state_idx].tolist()
        contexts: list[list[int] | None] = [tails[b].tolist()]
        for row in range(1, len(tokens)):
            above = contexts[parent[row]]
            filled = tokens[row] >= 0 and above is not None
            contexts.append([tokens[row], *above][: layout.reach] if filled else None)
        path = [row for row in walked.path[b].tolist() if row >= 0]
        for row, token in zip(path, walked.token_ids[b].tolist(), strict=False):
            if counts is not None:
                _count(table, counts.increments, contexts[row], salt, token, layout)
        for row in [*(row for row in range(len(tokens)) if row not in path), *path]:
            if contexts[row] is None:
                continue
            for _, own, address, head in layout.addresses(contexts[row], salt):
                if layout.has_own if own else layout.writes_shared:
                    best = successors[starts[b] + row].tolist()
                    writes[address] = (head, salt if own else 0, best)
    for address, (head, salt, best) in writes.items():
        write_entry(table, address, head, salt, best)
    if counts is not None:
        _fold(counts)


def _count(
    table: torch.Tensor,
    increments: torch.Tensor,
    context: list[int],
    salt: int,
    token: int,
    layout: MatrixLayout,
) -> None:
    found = find_entry(table, context, salt, layout)
    if found is None:
        return
    address, index, own = found
    head, *best, _ = table[address].tolist()
    for rank, successor in enumerate(best):
        if successor >= 0:
            right_and_seen = torch.tensor([int(successor == token), 1])
            increments[index, own, rank, head & 3] += right_and_seen.to(increments)


def _fold(counts: DeviceCounts) -> None:
    counts.counts[..., :ANY_STEADINESS, :] += counts.increments
    counts.counts[..., ANY_STEADINESS, :] += counts.increments.sum(dim=-2)
    counts.increments.zero_()
    seen = counts.counts[..., 1:]
    counts.counts.copy_(counts.counts * torch.where(seen > MOST_SEEN, 0.5, 1.0))
    right, seen = counts.counts[..., 0], counts.counts[..., 1]
    of_all = right[..., -1:] / seen[..., -1:].clamp(min=1)
    counts.rates.copy_((right[..., :-1] + PRIOR_WEIGHT * of_all) / (seen[..., :-1] + PRIOR_WEIGHT))


def seed(
    table: torch.Tensor,
    stamps: torch.Tensor,
    all_token_ids: torch.Tensor,
    *,
    layout: MatrixLayout,
    salts: torch.Tensor,
    req_state_indices: Sequence[int],
    lengths: Sequence[int],
    slice_size: int,
) -> None:
    """See `vllm_recycle.kernels.triton.matrix.seed.seed`."""
    assert not stamps.any()
    positions = [
        (req_state_idx, end)
        for req_state_idx, length in zip(req_state_indices, lengths, strict=True)
        for end in range(1, length)
    ]
    for first in range(0, len(positions), slice_size):
        # By address, what was found of it in order: (head, salt), follower, rest.
        found: dict[int, list[tuple[tuple[int, int], int, list[int]]]] = {}
        for req_state_idx, end in positions[first : first + slice_size]:
            text, salt = all_token_ids[req_state_idx].tolist(), int(salts[req_state_idx])
            if not 0 <= text[end] < layout.vocab_size:
                continue
            context = text[max(0, end - layout.reach) : end][::-1]
            known: dict[int, list[int]] = {}
            for index, own, address, head in layout.addresses(context, salt):
                reads = layout.has_own if own else layout.reads_shared
                if reads and is_written(table, address, head, salt if own else 0):
                    known[index] = table[address, 1:-1].tolist()
            for index, own, address, head in layout.addresses(context, salt):
                if bool(own) == layout.has_own:
                    rest = known.get(index, known.get(0, []))
                    row = ((head, salt if own else 0), text[end], rest)
                    found.setdefault(address, []).append(row)
        rows = {address: _merged(table, address, seen, layout) for address, seen in found.items()}
        for address, row in rows.items():
            table[address] = torch.tensor(row, dtype=torch.int32)


def _merged(
    table: torch.Tensor,
    address: int,
    seen: list[tuple[tuple[int, int], int, list[int]]],
    layout: MatrixLayout,
) -> list[int]:
    (head, salt), _, rest = seen[-1]
    followers = [follower for context, follower, _ in reversed(seen) if context == (head, salt)]
    latest = list(dict.fromkeys(followers))[:3]
    run = next((i for i, token in enumerate(followers) if token != latest[0]), len(followers))
    old, first = table[address, :2].tolist()
    stays = is_written(table, address, head, salt) and first == latest[0] and len(latest) == 1
    steadiness = min(MAX_STEADINESS, (old & 3) + run if stays else run - 1)
    successors = [*latest, *(token for token in rest if token >= 0 and token not in latest)]
    successors = [*successors, *[-1] * layout.k][: layout.k]
    return [head | steadiness, *successors, salt]
