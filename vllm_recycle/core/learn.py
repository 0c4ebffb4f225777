"""What a step teaches the adjacency matrix, and what a prompt does.

A step is learnt at once, as a device does it: whatever is read is as it was before the step. So is
each slice of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_recycle.core.acceptance import ANY_STEADINESS, MOST_SEEN
from vllm_recycle.core.adjacency import NUM_COUNTED, AdjacencyMatrix, Ends
from vllm_recycle.core.verification import NO_TOKEN, WalkResult

SLICE = 32  # positions of a text that are learnt at once


def top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The most probable tokens of logits [logit rows, vocab].

    Returns:
        int32 [logit rows, k], best first, of equal ones the lower first; and int64 [logit rows],
        the first of each, 0 where no logit is a number.

    """
    top_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return top_ids.to(torch.int32), top_ids[:, 0]


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """What the target computed of a batch, and what was accepted of it.

    Attributes:
        idx_mapping: integer [batch].
        parents: integer [batch, rows], of the trees; on a device those of all requests, int32
            [max_num_reqs, rows], by `req_state_idx`.
        row_token_ids: int64 [logit rows], -1 where a node was not filled: nothing is learnt there
            and below.
        cu_num_logits: integer [batch + 1]; the rows of a request are the root, and then the nodes
            that were scheduled.
        successors: int32 [logit rows, k], the target's most probable tokens, best first.
        walked: what the walk accepted.

    """

    idx_mapping: torch.Tensor
    parents: torch.Tensor
    row_token_ids: torch.Tensor
    cu_num_logits: torch.Tensor
    successors: torch.Tensor
    walked: WalkResult


def learn(
    matrix: AdjacencyMatrix, counts: torch.Tensor | None, ends: Ends, step: VerifiedStep
) -> None:
    """Count what was right at the visited rows, and write the entries of the contexts of all rows.

    Where several rows write one entry the last one stays: requests count in the order of the batch,
    and the accepted path of a request comes after its other rows, so that an entry has what the
    text went on with.

    Args:
        matrix: written in place.
        counts: see `AcceptanceTable`, written in place; None to count nothing.
        ends: of the texts up to each root; of no token where nothing is to be learnt at the root.
        step: what is learnt from.

    """
    layout, starts = matrix.layout, step.cu_num_logits.tolist()
    increments = None if counts is None else torch.zeros_like(counts[..., :ANY_STEADINESS, :])
    writes: dict[int, tuple[int, int, list[int]]] = {}  # by address: head, salt, successors
    tails = ends.tails(layout.reach)
    salts, classes = matrix.salts[step.idx_mapping], matrix.classes[step.idx_mapping]
    for b, (salt, request_class) in enumerate(zip(salts.tolist(), classes.tolist(), strict=True)):
        first_row, end = starts[b], starts[b + 1]
        tokens, parents = step.row_token_ids[first_row:end].tolist(), step.parents[b].tolist()
        contexts = _contexts(tails[b], tokens, parents, layout.reach)
        path = [row for row in step.walked.path[b].tolist() if row >= 0]
        for row, token in zip(path, step.walked.token_ids[b].tolist(), strict=False):
            if increments is not None and request_class < NUM_COUNTED:
                _count(matrix, increments[request_class], contexts[row], salt, token)
        for row in [*(row for row in range(len(tokens)) if row not in path), *path]:
            best = step.successors[first_row + row].tolist()
            for _, own, address, head in layout.each_address(contexts[row], salt):
                writes[address] = (head, salt if own else 0, best)
    for address, entry in writes.items():
        matrix.write_entry(address, *entry)
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
        context = contexts[parents[row]]
        contexts.append([tokens[row], *context][:reach] if context and tokens[row] >= 0 else [])
    return contexts


def _count(
    matrix: AdjacencyMatrix, increments: torch.Tensor, context: list[int], salt: int, token: int
) -> None:
    """Count which successors of the entries that a draft may be made from were right, and all."""
    for address, index, own in matrix.longest_entries(context, salt):
        head, *successors, _ = matrix.table[address].tolist()
        for rank, successor in enumerate(successors):
            if successor != NO_TOKEN:
                cell = increments[index, own, rank, head & 3]
                cell += torch.tensor([float(successor == token), 1.0], dtype=cell.dtype)


def seed(matrix: AdjacencyMatrix, req_state_idx: int, token_ids: torch.Tensor) -> None:
    """Write the entries of a text, int64 [length]: what followed comes first, then what is known.

    Of a context that is what was known of it before the slice, or else of its last token. Where
    several positions of a slice write one entry the last one stays. A sequence that has entries of
    its own writes these alone, since no target said so yet.
    """
    layout, salt = matrix.layout, int(matrix.salts[req_state_idx])
    tokens = token_ids.tolist()
    for first in range(1, len(tokens), SLICE):
        writes: dict[int, tuple[int, int, list[int]]] = {}  # by address: head, salt, successors
        for end in range(first, min(first + SLICE, len(tokens))):
            context, follower = tokens[max(0, end - layout.reach) : end][::-1], tokens[end]
            if not 0 <= follower < layout.vocab_size:
                continue
            # By index of the length; the own entry comes last.
            known_successors = {
                index: matrix.table[address, 1:-1].tolist()
                for address, index, _ in matrix.known_entries(context, salt)
            }
            for index, own, address, head in layout.each_address(context, salt):
                if own == layout.has_own:
                    known = known_successors.get(index, known_successors.get(0, []))
                    others = [token for token in known if token not in (follower, NO_TOKEN)]
                    successors = [follower, *others, *[NO_TOKEN] * layout.k][: layout.k]
                    writes[address] = (head, salt if own else 0, successors)
        for address, entry in writes.items():
            matrix.write_entry(address, *entry)
