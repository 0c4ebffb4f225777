"""Steps of a toy target with grown trees, for the tests of the core and of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vllm_recycle.core.adjacency import AdjacencyMatrix, Ends, MatrixLayout
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.token_recycling import TokenRecyclingProposer
from vllm_recycle.core.tree import Trees
from vllm_recycle.core.verification import WalkResult

VOCAB, K = 7, 3

# The most probable tokens after a text, best first.
Target = Callable[[list[int]], list[int]]


def make_matrix(scope="sequence", *, vocab_size=VOCAB, k=K, contexts=(1, 2), **options):
    options = {"slots": 256, "max_num_reqs": 3, **options}
    return AdjacencyMatrix(vocab_size, k, contexts=contexts, scope=scope, **options)


def write_entries(
    matrix: AdjacencyMatrix,
    context: Sequence[int],
    salt: int,
    successors: Sequence[int],
    *,
    own: bool,
    shared: bool,
) -> None:
    """Write what follows a context into the entries of all its lengths, own or shared ones."""
    for _, is_own, address, head in matrix.layout.each_address(context, salt):
        if own if is_own else shared:
            matrix.write_entry(address, head, salt if is_own else 0, successors)


def write(matrix: AdjacencyMatrix, req_state_idx: int, context: list[int], successors: list[int]):
    layout, salt = matrix.layout, int(matrix.salts[req_state_idx])
    own, shared = layout.has_own, layout.has_shared
    write_entries(matrix, context, salt, successors, own=own, shared=shared)


def seen(matrix: AdjacencyMatrix, req_state_idx: int, context: list[int]) -> list[int] | None:
    """The successors of the longest entry of a context, of the request's own if there is one."""
    found = matrix.longest_entries(context, int(matrix.salts[req_state_idx]))
    return matrix.table[found[-1][0], 1:-1].tolist() if found else None


def started(scope="sequence", **options) -> AdjacencyMatrix:
    """A matrix with two requests running."""
    matrix = make_matrix(scope, **options)
    matrix.begin(0)
    matrix.begin(1)
    return matrix


def ends_of(texts: Sequence[list[int]]) -> Ends:
    """Where these texts end; what lies behind their ends is nobody's."""
    most = max(map(len, texts))
    padded = [[*text, *[0] * (most - len(text))] for text in texts]
    return Ends(torch.tensor(padded, dtype=torch.int32), [len(text) - 1 for text in texts])


def as_tensors(drafts: Drafts, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and parents, int64 [batch, nodes], padded with -1 and with the root."""
    return tuple(
        torch.tensor([[*row, *[filler] * (nodes - len(row))] for row in of_each])
        for of_each, filler in zip(drafts[:2], (-1, 0), strict=True)
    )


def texts_of_rows(text: list[int], parents: list[int], token_ids: list[int]) -> list[list[int]]:
    """The text that each row ends: the root, and then the nodes with these tokens."""
    texts = [text]
    for row, token in enumerate(token_ids, start=1):
        texts.append([*texts[parents[row]], token])
    return texts


def verify(
    proposer: TokenRecyclingProposer,
    idx_mapping: torch.Tensor,
    texts: list[list[int]],
    target: Target,
    trees: Trees,
    drafts: torch.Tensor,
    num_scheduled: Sequence[int],
) -> WalkResult:
    """What follows a draft: the target's tokens at all rows, the walk, and learning from them.

    Of each tree the first nodes are scheduled, so many as said. The texts grow by what is accepted.
    """
    k = proposer.layout.k
    starts, row_token_ids, successors = [0], [], []
    for text, parents, draft, count in zip(
        texts, trees.parents.tolist(), drafts.tolist(), num_scheduled, strict=True
    ):
        starts.append(starts[-1] + 1 + count)
        row_token_ids += [text[-1], *draft[:count]]
        successors += [target(row)[:k] for row in texts_of_rows(text, parents, draft[:count])]
    best = torch.tensor(successors, dtype=torch.int32)
    cu_num_logits = torch.tensor(starts)
    walked = proposer.operations.walk(best[:, 0].long(), drafts, cu_num_logits, trees=trees)
    step = VerifiedStep(
        idx_mapping, trees.parents, torch.tensor(row_token_ids), cu_num_logits, best, walked
    )
    proposer.learn(ends_of(texts), step)
    for text, emitted in zip(texts, walked.token_ids.tolist(), strict=True):
        text += [token for token in emitted if token >= 0]
    return walked


def learn_text(
    proposer: TokenRecyclingProposer, req_state_idx: int, text: list[int], successors: list[int]
) -> WalkResult:
    """A plain step of one request, without drafts: what the target says comes after a text."""
    idx_mapping = torch.tensor([req_state_idx])
    trees = Trees.from_parents(torch.zeros(1, proposer.num_nodes + 1, dtype=torch.int64))
    drafts = torch.full((1, proposer.num_nodes), -1)
    return verify(proposer, idx_mapping, [list(text)], lambda _: successors, trees, drafts, [0])


def address_of(layout: MatrixLayout, context: Sequence[int], salt: int, *, own: bool) -> int:
    """Where the entry of the whole of a context is."""
    return next(
        address
        for index, is_own, address, _ in layout.each_address(context, salt)
        if layout.contexts[index] == len(context) and is_own == own
    )
