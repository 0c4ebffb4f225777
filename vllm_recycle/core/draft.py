"""What is drafted for a step: of each kind that has a price as many nodes as pay, and of these
kinds the one that promises the most tokens by its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch

from vllm_recycle.core.acceptance import rates
from vllm_recycle.core.adjacency import AdjacencyMatrix
from vllm_recycle.core.grow import Growth, TextEnds, fill, grow
from vllm_recycle.core.price import CHAINS, choose, least_slopes
from vllm_recycle.core.tree import MAX_CHAIN, TreeTemplate

# Matrix products may work in tiles of as many rows.
NEXT_ROWS = 32


class Drafts(NamedTuple):
    """The drafts of a step.

    Attributes:
        token_ids: of each request, those of its nodes, -1 where a node is not filled.
        parents: of each request, the parent row of each node; the root is row 0.
        rate: expected tokens of the step that verifies them, by its time; 0 where that is unknown.

    """

    token_ids: list[list[int]]
    parents: list[list[int]]
    rate: float = 0.0


def draft(
    matrix: AdjacencyMatrix,
    counts: torch.Tensor,
    texts: TextEnds,
    *,
    prices: Mapping[str, torch.Tensor],
    max_nodes: int,
    tree: TreeTemplate | None = None,
) -> Drafts:
    """Draft below the last token of each text; the last node of each draft is filled.

    Args:
        matrix, texts: see `grow`.
        counts: see `AcceptanceTable`.
        prices: by what the drafts of the step are, its time by its rows, float64 [rows + 1]; of
            equal offers the first is taken.
        max_nodes: the most nodes of a draft.
        tree: the template that is filled where drafts are trees; None to grow them.

    """
    given, offers = (matrix, rates(counts), texts), []
    batch = len(texts.idx_mapping)
    for kind, times in prices.items():
        if kind != CHAINS and tree is not None:
            growth = fill(*given, tree=tree)
        else:
            most, ranks = (min(max_nodes, MAX_CHAIN), 1) if kind == CHAINS else (max_nodes, None)
            of_kind = partial(grow, *given, max_nodes=most, ranks=ranks)
            reached = times[: 1 + batch * (1 + most)].tolist()
            growth = _grow_what_may_pay(of_kind, reached, num_reqs=batch)
        offers.append((growth, *choose(growth.worths[:, :max_nodes], times)))
    growth, sizes, rate = max(offers, key=itemgetter(2))
    token_ids, parents = growth.token_ids.tolist(), growth.parents[:, 1:].tolist()
    of_each = [slice(size) for size in sizes.tolist()]
    return Drafts(
        [of_text[nodes] for of_text, nodes in zip(token_ids, of_each, strict=True)],
        [of_text[nodes] for of_text, nodes in zip(parents, of_each, strict=True)],
        rate,
    )


def _grow_what_may_pay(grow: Callable[..., Growth], times: list[float], *, num_reqs: int) -> Growth:
    """Grow trees without nodes that `choose` would never take, since most could be grown for long.

    A step without drafts gives its tokens at some rate, and the best step at this rate or a better
    one. Behind all nodes that were grown, each row more costs `slope` or more; a node that is worth
    no more than the rate times `slope` cannot raise it there. So nothing that was left out would be
    chosen, if the slope there is no less than the one by which it was left out.

    `grow` grows trees whose nodes are worth more than `least_worth`; `times` are those of a step as
    far as it has room for nodes; `num_reqs` are the rows of the step without drafts.
    """
    last, slopes = len(times) - 1, least_slopes(times)
    first = min(num_reqs, last)
    plain = num_reqs / times[first]
    # Where times rise in stairs, the slope by the next stairs too, so that once is mostly enough.
    slope = min(slopes[first : first + NEXT_ROWS])
    while True:
        growth = grow(least_worth=plain * slope)
        behind = slopes[min(num_reqs + int(growth.num_nodes.sum()), last)]
        if behind >= slope:
            return growth
        slope = behind
