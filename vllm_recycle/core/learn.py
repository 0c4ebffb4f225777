"""What a step teaches: counts and rows, and the rows of a prompt. References, token by token."""

from __future__ import annotations

import torch

from vllm_recycle.core.acceptance import ANY_STEADINESS, MOST_SEEN
from vllm_recycle.core.adjacency import (
    MatrixLayout,
    find_entry,
    is_written,
    write_entries,
    write_entry,
)
from vllm_recycle.core.verification import NO_TOKEN, WalkResult


def top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [logit rows, k], the most probable tokens of logits [logit rows, vocab], best first.

    Of equal ones the lower token comes first.
    """
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :k].to(torch.int32)


def learn(
    table: torch.Tensor,
    counts: torch.Tensor | None,
    *,
    layout: MatrixLayout,
    salts: torch.Tensor,
    tails: torch.Tensor,
    parents: torch.Tensor,
    row_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    successors: torch.Tensor,
    walked: WalkResult,
) -> None:
    """Count what was right at the visited rows, then write the rows of all contexts.

    The rows that were not accepted are written first, and the accepted path last, so that of
    several for one context the one that the text went on with stays.

    Args:
        table: int32 [addresses, 2 + k], written in place.
        counts: see `AcceptanceTable`, written in place; None to count nothing.
        layout: of the table.
        salts: int64 [batch].
        tails: int64 [batch, reach], text before and with each root, the newest first.
        parents: int64 [batch, rows], of the trees.
        row_token_ids: int64 [logit rows].
        cu_num_logits: int64 [batch + 1].
        successors: int32 [logit rows, k], best first.
        walked: what the walk accepted.

    """
    starts = cu_num_logits.tolist()
    for b, salt in enumerate(salts.tolist()):
        rows = range(starts[b], starts[b + 1])
        tokens, parent = row_token_ids[starts[b] : starts[b + 1]].tolist(), parents[b].tolist()
        tail = tails[b].tolist()
        contexts = [tail]
        for row in range(1, len(rows)):
            contexts.append([tokens[row], *contexts[parent[row]]][: layout.reach])
        path = [row for row in walked.path[b].tolist() if row >= 0]
        if counts is not None:
            for row, token in zip(path, walked.token_ids[b].tolist(), strict=False):
                _count(table, counts, contexts[row], salt, token, layout)
        visited = set(path)
        for row in [*(row for row in range(len(rows)) if row not in visited), *path]:
            write_entries(
                table,
                contexts[row],
                salt,
                successors[starts[b] + row].tolist(),
                layout,
                own=layout.has_own,
                shared=layout.writes_shared,
            )


def _count(
    table: torch.Tensor,
    counts: torch.Tensor,
    context: list[int],
    salt: int,
    token: int,
    layout: MatrixLayout,
) -> None:
    found = find_entry(table, context, salt, layout)
    if found is None:
        return
    address, index, own = found
    head, *successors, _ = table[address].tolist()
    for rank, successor in enumerate(successors):
        if successor == NO_TOKEN:
            continue
        for steadiness in (head & 3, ANY_STEADINESS):
            cell = counts[index, own, rank, steadiness]
            cell[0] += float(successor == token)
            cell[1] += 1.0
            if cell[1] > MOST_SEEN:
                cell *= 0.5


def seed(table: torch.Tensor, token_ids: torch.Tensor, salt: int, *, layout: MatrixLayout) -> None:
    """Write the rows of a text: what followed comes first, then what is known.

    A sequence that has rows of its own writes these alone, since nobody else said so yet.

    Args:
        table: int32 [addresses, 2 + k], written in place.
        token_ids: int64 [length], a text.
        salt: of its sequence.
        layout: of the table.

    """
    tokens = token_ids.tolist()
    for end in range(1, len(tokens)):
        context = tokens[max(0, end - layout.reach) : end][::-1]
        follower = tokens[end]
        if not 0 <= follower < layout.vocab_size:
            continue
        known: dict[int, list[int]] = {}  # by index of the length; the own row, where there is one
        for index, own, address, head in layout.addresses(context, salt):
            if not (layout.has_own if own else layout.reads_shared):
                continue
            if is_written(table, address, head, salt if own else 0):
                known[index] = table[address, 1:-1].tolist()
        of_one = known.get(0, [])
        for index, own, address, head in layout.addresses(context, salt):
            if bool(own) == layout.has_own:
                rest = [t for t in known.get(index, of_one) if t not in (follower, NO_TOKEN)]
                successors = [follower, *rest][: layout.k]
                successors += [NO_TOKEN] * (layout.k - len(successors))
                write_entry(table, address, head, salt if own else 0, successors)
