"""What learning on the device does to context rows: plain Python, and what is correct.

A step there learns at once, see `vllm_recycle.kernels.triton.context_learning`; the functions of
`core.dynamic.learning` learn row by row. Both are the same where no two rows have one address.
"""

from __future__ import annotations

import torch

from vllm_recycle.core.dynamic import RowLayout
from vllm_recycle.core.dynamic.acceptance import ANY_STEADINESS, MOST_SEEN, PRIOR_WEIGHT
from vllm_recycle.core.dynamic.context_rows import find_row, write_row
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.kernels.triton.context_counts import DeviceCounts

# Head but for its steadiness, salt and successors.
Write = tuple[int, int, list[int]]


def learn(
    table: torch.Tensor,
    stamps: torch.Tensor,
    counts: DeviceCounts | None,
    *,
    layout: RowLayout,
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
    """See `vllm_recycle.kernels.triton.context_learning.learn`."""
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
        write_row(table, address, head, salt, best)
    if counts is not None:
        _fold(counts)


def _count(
    table: torch.Tensor,
    increments: torch.Tensor,
    context: list[int],
    salt: int,
    token: int,
    layout: RowLayout,
) -> None:
    found = find_row(table, context, salt, layout)
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
