"""What a step teaches the adjacency matrix, and what a prompt does.

A step is learnt at once, as a device does it: whatever is read is as it was before the step.
"""

from __future__ import annotations

import torch

from vllm_recycle.core.acceptance import ANY_STEADINESS, MOST_SEEN
from vllm_recycle.core.adjacency import MatrixLayout, find_entry, is_written, write_entry
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
    """Count what was right at the visited rows, and write the entries of the contexts of all rows.

    Where several rows write one entry the last one stays: requests count in the order of the batch,
    and the accepted path of a request comes after its other rows, so that an entry has what the
    text went on with.

    Args:
        table: int32 [addresses, 2 + k], written in place.
        counts: see `AcceptanceTable`, written in place; None to count nothing.
        layout: of the table.
        salts: int64 [batch].
        tails: int64 [batch, reach], the text up to each root, the newest token first; -1 where
            nothing is to be learnt at the root.
        parents: int64 [batch, rows], of the trees.
        row_token_ids: int64 [logit rows], -1 where a node was not filled: nothing is learnt there
            and below.
        cu_num_logits: integer [batch + 1]; the rows of a request are the root, and then the nodes
            that were scheduled.
        successors: int32 [logit rows, k], the target's most probable tokens, best first.
        walked: what the walk accepted.

    """
    starts = cu_num_logits.tolist()
    increments = None if counts is None else torch.zeros_like(counts[..., :ANY_STEADINESS, :])
    writes: dict[int, tuple[int, int, list[int]]] = {}  # by address: head, salt, successors
    for b, salt in enumerate(salts.tolist()):
        first, end = starts[b], starts[b + 1]
        tokens, parent = row_token_ids[first:end].tolist(), parents[b].tolist()
        contexts = _contexts(tails[b].tolist(), tokens, parent, layout.reach)
        path = [row for row in walked.path[b].tolist() if row >= 0]
        for row, token in zip(path, walked.token_ids[b].tolist(), strict=False):
            if increments is not None:
                _count(table, increments, contexts[row], salt, token, layout)
        for row in [*(row for row in range(len(tokens)) if row not in path), *path]:
            best = successors[first + row].tolist()
            for _, own, address, head in layout.addresses(contexts[row], salt):
                if layout.has_own if own else layout.writes_shared:
                    writes[address] = (head, salt if own else 0, best)
    for address, (head, salt, best) in writes.items():
        write_entry(table, address, head, salt, best)
    if counts is not None and increments is not None:
        counts[..., :ANY_STEADINESS, :] += increments
        counts[..., ANY_STEADINESS, :] += increments.sum(dim=-2)
        counts *= torch.where(counts[..., 1:] > MOST_SEEN, 0.5, 1.0)


def _contexts(
    tail: list[int], tokens: list[int], parents: list[int], reach: int
) -> list[list[int]]:
    """The context of each row, the newest token first; empty where a node was not filled."""
    contexts = [tail][: len(tokens)]
    for row in range(1, len(tokens)):
        above = contexts[parents[row]]
        contexts.append([tokens[row], *above][:reach] if above and tokens[row] >= 0 else [])
    return contexts


def _count(
    table: torch.Tensor,
    increments: torch.Tensor,
    context: list[int],
    salt: int,
    token: int,
    layout: MatrixLayout,
) -> None:
    """Count which successor of the entry that a draft is made from was right, and all as seen."""
    found = find_entry(table, context, salt, layout)
    if found is None:
        return
    address, index, own = found
    head, *successors, _ = table[address].tolist()
    for rank, successor in enumerate(successors):
        if successor != NO_TOKEN:
            cell = increments[index, own, rank, head & 3]
            cell += torch.tensor([float(successor == token), 1.0], dtype=cell.dtype)


def seed(table: torch.Tensor, token_ids: torch.Tensor, salt: int, *, layout: MatrixLayout) -> None:
    """Write the entries of a text: what followed comes first, then what is known.

    A sequence that has entries of its own writes these alone, since no target said so yet.

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
        known: dict[int, list[int]] = {}  # by index of the length; the own entry comes last
        for index, own, address, head in layout.addresses(context, salt):
            reads = layout.has_own if own else layout.reads_shared
            if reads and is_written(table, address, head, salt if own else 0):
                known[index] = table[address, 1:-1].tolist()
        of_one = known.get(0, [])
        for index, own, address, head in layout.addresses(context, salt):
            if bool(own) == layout.has_own:
                rest = [t for t in known.get(index, of_one) if t not in (follower, NO_TOKEN)]
                successors = [follower, *rest][: layout.k]
                successors += [NO_TOKEN] * (layout.k - len(successors))
                write_entry(table, address, head, salt if own else 0, successors)
