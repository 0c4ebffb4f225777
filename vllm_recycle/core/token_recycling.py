"""Token Recycling as a proposer: what is drafted where, and what is learnt when.

A tree is grown for each request, or a template is filled; both from the one adjacency matrix, which
learns from every row that the target computes (arXiv 2408.08696, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter

import numpy as np
import torch

from vllm_recycle.core import reference
from vllm_recycle.core.acceptance import AcceptanceTable
from vllm_recycle.core.adjacency import AdjacencyMatrix, MatrixLayout
from vllm_recycle.core.grow import Growth, TextEnds
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.operations import Operations
from vllm_recycle.core.price import CHAINS, Price, cut
from vllm_recycle.core.saved_state import SavedState, check_token_ids
from vllm_recycle.core.tree import MAX_CHAIN, TreeTemplate
from vllm_recycle.core.verification import NO_TOKEN

# Of the state file. The formats before it had no name: the matrix of single tokens, and beside it
# entries of longer contexts.
FORMAT = "vllm_recycle.adjacency_matrix/3"

# Matrix products may work in tiles of as many rows.
NEXT_ROWS = 32


class TokenRecyclingState(SavedState):
    """What is learnt: the adjacency matrix, and how often its entries were right."""

    def __init__(self, matrix: AdjacencyMatrix) -> None:
        self.matrix = matrix
        self.acceptance = AcceptanceTable(matrix.layout, device=matrix.table.device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"adjacency_matrix": self.matrix.table, "acceptance": self.acceptance.counts}

    @property
    def share_written(self) -> float:
        """The part of the entries that were ever written."""
        return self.matrix.num_written / len(self.matrix.table)

    def clear(self) -> None:
        """Forget everything but what is shipped."""
        self.matrix.clear()
        self.acceptance.clear()

    def contents(self) -> dict[str, torch.Tensor]:
        """What sequences share."""
        return {**self.tensors, "adjacency_matrix": self.matrix.shared_entries()}

    def validate(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_token_ids(tensors["adjacency_matrix"][:, 1:-1], self.matrix.layout.vocab_size)
        right, seen = tensors["acceptance"].unbind(-1)
        if not bool(((right >= 0) & (right <= seen) & seen.isfinite()).all()):
            raise ValueError("it has counts that are none")

    def describe(self) -> str:
        """What it holds, as part of a start-up line."""
        matrix, layout = self.matrix, self.matrix.layout
        return (
            f"k {layout.k}, contexts {list(layout.contexts)}, scope {matrix.scope}, "
            f"{matrix.num_written} of {len(matrix.table)} entries known"
        )

    @property
    def facts(self) -> dict[str, object]:
        layout = self.matrix.layout
        return {
            "format": FORMAT,
            "vocab_size": layout.vocab_size,
            "k": layout.k,
            "contexts": list(layout.contexts),
            "slots": layout.slots,
        }


class TokenRecyclingProposer:
    """Drafts a tree for each request, and learns from what the target computed.

    Args:
        state: what it learns.
        max_nodes: the most nodes of a tree that is grown.
        tree: the template to fill, its ranks below k; None to grow trees.
        seed_from_prompt: whether the prompt's text enters the matrix before decoding.
        operations: what drafts, chooses, walks and learns.

    """

    def __init__(
        self,
        state: TokenRecyclingState,
        *,
        max_nodes: int,
        tree: TreeTemplate | None = None,
        seed_from_prompt: bool = True,
        operations: Operations = reference,
    ) -> None:
        if tree is not None:
            tree.check_ranks(state.matrix.layout.k)
            max_nodes = tree.num_nodes
        self.state = state
        self.tree = tree
        self.num_nodes = max_nodes
        self.seed_from_prompt = seed_from_prompt
        self.operations = operations

    @property
    def layout(self) -> MatrixLayout:
        return self.state.matrix.layout

    def propose(
        self,
        idx_mapping: torch.Tensor,
        tails: torch.Tensor,
        *,
        max_depths: torch.Tensor,
        prices: Mapping[str, Price],
        num_other_rows: int,
        max_nodes: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft below the last token of each request, as many nodes as pay.

        All drafts are of one kind, of those that have a price: the one that promises the most
        tokens by its time.

        Args:
            idx_mapping: int64 [batch].
            tails: int64 [batch, reach], the end of each text, the newest token first, padded
                with -1.
            max_depths: int64 [batch], the most tokens that a path of each may have.
            prices: of the step, by what its drafts are.
            num_other_rows: requests of the step that is drafted for beside these.
            max_nodes: the most nodes of a tree; None for as many as there is room for.

        Returns:
            Token ids, int64 [batch, nodes], at most `max_nodes`, -1 where a node is not filled, and
            behind the last one; and the parent row of each node, int64 [batch, nodes].

        """
        max_nodes = self.num_nodes if max_nodes is None else max_nodes
        texts = TextEnds(idx_mapping, tails, max_depths)
        rates = self.operations.rates(self.state.acceptance.counts)
        given = (self.state.matrix, rates, texts)
        offers = []
        for kind, price in prices.items():
            if kind != CHAINS and self.tree is not None:
                growth = self.operations.fill(*given, tree=self.tree)
            else:
                grow = partial(self.operations.grow, *given, max_nodes=max_nodes)
                if kind == CHAINS:
                    grow = partial(grow, max_nodes=min(max_nodes, MAX_CHAIN), ranks=1)
                growth = _grow_what_may_pay(grow, price, num_other_rows + len(tails))
            worths = growth.worths[:, :max_nodes]
            chosen = self.operations.choose(worths, price.times, num_other_rows=num_other_rows)
            offers.append((growth, *chosen))
        growth, counts, _ = max(offers, key=itemgetter(2))
        token_ids = cut(growth.token_ids[:, :max_nodes], counts)
        return token_ids, growth.parents[:, 1 : 1 + max_nodes]

    def learn(self, tails: torch.Tensor, step: VerifiedStep) -> None:
        """Take in what the target computed; `tails` as for `propose`, up to and with each root."""
        state = self.state
        # Under `isolated` nobody's counts reach another: what is shipped serves.
        counts = state.acceptance.counts if self.layout.has_shared else None
        self.operations.learn(state.matrix, counts, tails, step)

    def begin(self, req_state_idx: int, token_ids: torch.Tensor) -> None:
        """A request starts with a text, int64 [length]."""
        self.state.matrix.begin(req_state_idx)
        if self.seed_from_prompt:
            self.operations.seed(self.state.matrix, req_state_idx, token_ids)

    def take_in(self, token_ids: torch.Tensor, req_state_idx: int | None = None) -> None:
        """Take in a text, int64 [length], as a prompt: of one request, or else for all of them."""
        matrix = self.state.matrix
        if req_state_idx is None:
            matrix, req_state_idx = matrix.of_all(), 0
        self.operations.seed(matrix, req_state_idx, token_ids)


def _grow_what_may_pay(grow: Callable[..., Growth], price: Price, num_reqs: int) -> Growth:
    """Grow trees without nodes that `choose` would never take, since most could be grown for long.

    A step without drafts gives its tokens at some rate, and the best step at this rate or a better
    one. Behind all nodes that were grown, each row more costs `slope` or more; a node that is worth
    no more than the rate times `slope` cannot raise it there. So nothing that was left out would be
    chosen, if the slope there is no less than the one by which it was left out.

    `grow` grows trees whose nodes are worth more than `least_worth`; `num_reqs` are the rows of the
    step without drafts.
    """
    times, slopes = (values.numpy() for values in price)
    last = len(times) - 1
    first = min(num_reqs, last)
    plain = num_reqs / float(times[first])
    # Where times rise in stairs, the slope by the next stairs too, so that once is mostly enough.
    slope = min(slopes[first : first + NEXT_ROWS].tolist())
    while True:
        growth = grow(least_worth=plain * slope)
        num_rows = num_reqs + int(np.count_nonzero(growth.token_ids.numpy() != NO_TOKEN))
        behind = float(slopes[min(num_rows, last)])
        if behind >= slope:
            return growth
        slope = behind
