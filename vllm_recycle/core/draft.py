"""Drafting for a step: as many nodes as pay, of the kind that promises the most tokens a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch

from vllm_recycle.core.acceptance import rates
from vllm_recycle.core.adjacency import AdjacencyMatrix
from vllm_recycle.core.choose import Price, choose, least_slopes
from vllm_recycle.core.curve import CHAINS
from vllm_recycle.core.grow import Growth, TextEnds, fill, grow
from vllm_recycle.core.tree import MAX_CHAIN, TreeTemplate

# Matrix products may work in tiles of as many rows.
NEXT_ROWS = 32


class Drafts(NamedTuple):
    """The drafts of a step.

    Attributes:
        token_ids: per request, those of its nodes, -1 where a node is not filled.
        parents: per request, the parent row of each node; the root is row 0.
        kind: of all drafts of the step.
        rate: expected tokens a second of the step that verifies them.
        expected: draft tokens that are expected to be accepted, before `Price.trust`.

    """

    token_ids: list[list[int]]
    parents: list[list[int]]
    kind: str | None = None
    rate: float = 0.0
    expected: float = 0.0

    @classmethod
    def none(cls, num_reqs: int) -> Drafts:
        """Of a step without drafts."""
        return cls([[] for _ in range(num_reqs)], [[] for _ in range(num_reqs)])


def draft(
    matrix: AdjacencyMatrix,
    counts: torch.Tensor,
    texts: TextEnds,
    *,
    prices: Mapping[str, Price],
    max_nodes: int,
    tree: TreeTemplate | None = None,
) -> Drafts:
    """Draft below the last token of each text; the last node of each draft is filled.

    Args:
        matrix, texts: see `grow`.
        counts: see `AcceptanceTable`.
        prices: of the kinds that the drafts may be of; of equal offers the first is taken.
        max_nodes: the most nodes of a draft.
        tree: the template that is filled where drafts are trees; None to grow them.

    """
    arguments, offers = (matrix, rates(counts), texts), []
    batch = len(texts.idx_mapping)
    for kind, price in prices.items():
        if kind != CHAINS and tree is not None:
            growth = fill(*arguments, tree=tree)
        else:
            limit, ranks = (min(max_nodes, MAX_CHAIN), 1) if kind == CHAINS else (max_nodes, None)
            grow_kind = partial(grow, *arguments, max_nodes=limit, ranks=ranks)
            reachable_price = Price(price.seconds[: 1 + batch * (1 + limit)], price.trust)
            growth = _grow_what_may_pay(grow_kind, reachable_price, num_reqs=batch)
        worths, seconds = growth.worths[:, :max_nodes].tolist(), price.seconds.tolist()
        offers.append((kind, growth, *choose(worths, seconds, trust=price.trust)))
    kind, growth, sizes, rate = max(offers, key=itemgetter(3))
    pairs = zip(growth.worths.tolist(), sizes, strict=True)
    expected = sum(sum(node_worths[:size]) for node_worths, size in pairs)
    token_ids, parents = growth.token_ids.tolist(), growth.parents[:, 1:].tolist()
    prefixes = [slice(size) for size in sizes]
    return Drafts(
        [nodes[prefix] for nodes, prefix in zip(token_ids, prefixes, strict=True)],
        [nodes[prefix] for nodes, prefix in zip(parents, prefixes, strict=True)],
        kind,
        rate,
        expected,
    )


def _grow_what_may_pay(grow: Callable[..., Growth], price: Price, *, num_reqs: int) -> Growth:
    """Grow trees without nodes that `choose` would never take, since most could be grown for long.

    A step without drafts gives its tokens at some rate, and the best step at this rate or a better
    one. Behind all nodes that were grown, each row more costs `slope` or more; a node that is worth
    no more than the rate times `slope` cannot raise it there. So nothing that was left out would be
    chosen, if the slope there is no less than the one by which it was left out.

    `grow` grows trees whose nodes are worth more than `least_worth`; the price is that of a step as
    far as it has room for nodes; `num_reqs` are the rows of the step without drafts.
    """
    seconds = price.seconds.tolist()
    max_rows, slopes = len(seconds) - 1, least_slopes(seconds)
    plain_rows = min(num_reqs, max_rows)
    plain_rate = num_reqs / seconds[plain_rows] / price.trust
    # Where times rise in stairs, the slope by the next stairs too, so that once is mostly enough.
    slope = min(slopes[plain_rows : plain_rows + NEXT_ROWS])
    while True:
        growth = grow(least_worth=plain_rate * slope)
        next_slope = slopes[min(num_reqs + int(growth.num_nodes.sum()), max_rows)]
        if not next_slope < slope:
            return growth
        slope = next_slope
