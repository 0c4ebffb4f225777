"""Drafting from the adjacency matrix: trees grown best first, and templates filled.

A node is worth the chance that it is accepted: the product of the acceptance rates along its path.
How many nodes of a tree are verified is not decided here, see `choose.choose`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from vllm_recycle.core.adjacency import AdjacencyMatrix, Ends
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.core.verification import NO_TOKEN

# How far trees that a device grows are searched: nodes of a level that are expanded, and levels.
BEAM = 16
LEVELS = 16
NO_PLACE = -1


class Trunks(NamedTuple):
    """What a draft model says below each text: a chain, and other choices beside its tokens.

    Attributes:
        token_ids: int64 [batch, gamma, choices], what it finds most probable behind the text and
            the first choices before, best first; these are the trunk. -1 behind its end.
        chances: float64 [batch, gamma, choices], that each is right where the trunk before it is.

    """

    token_ids: torch.Tensor
    chances: torch.Tensor

    def at(self, b: int, place: int) -> dict[int, float]:
        """The choices at a place of a trunk, and their chances; none behind its end."""
        if not 0 <= place < self.token_ids.shape[1]:
            return {}
        token_ids, chances = self.token_ids[b, place].tolist(), self.chances[b, place].tolist()
        pairs = zip(token_ids, chances, strict=True)
        return {token: chance for token, chance in pairs if token != NO_TOKEN}


class Allowed(NamedTuple):
    """What a grammar allows at a row.

    Attributes:
        words: int32 [words]; token t is allowed where bit t % 32 of word t // 32 is set.
        expected: an allowed token that is to be expected there, if any; else -1.

    """

    words: torch.Tensor
    expected: int = NO_TOKEN

    def has(self, token: int) -> bool:
        """Whether a token is allowed."""
        word = token // 32
        return word < len(self.words) and bool(int(self.words[word]) >> token % 32 & 1)


class Grammar(Protocol):
    """What a text has to follow, looked at ahead of its end."""

    def allowed(self, path: Sequence[int]) -> Allowed | None:
        """What is allowed behind a path of tokens below the text; None where that is not said.

        While a draft is made it says the same of a path whenever it is asked.
        """


@dataclass(frozen=True, slots=True)
class TextEnds:
    """Texts of requests, and how far is drafted below them.

    Attributes:
        idx_mapping: int64 [batch].
        ends: of the texts.
        max_depths: of each the most levels of its tree below the root.
        trunks: of a draft model; None where there is none.
        grammars: of each text the one that it follows, or None; None where no text has one.

    """

    idx_mapping: torch.Tensor
    ends: Ends
    max_depths: Sequence[int]
    trunks: Trunks | None = None
    grammars: Sequence[Grammar | None] | None = None

    def only(self, index: int) -> TextEnds:
        """One of these."""
        one, ends = slice(index, index + 1), self.ends
        is_token = None if ends.is_token is None else ends.is_token[one]
        ends = Ends(ends.token_ids[one], ends.last[one], is_token)
        trunks = self.trunks and Trunks(*(values[one] for values in self.trunks))
        grammars = self.grammars and self.grammars[one]
        return TextEnds(self.idx_mapping[one], ends, self.max_depths[one], trunks, grammars)

    def allowed(self, b: int, path: Sequence[int]) -> Allowed | None:
        """See `Grammar.allowed`."""
        grammar = self.grammars and self.grammars[b]
        return grammar.allowed(path) if grammar else None

    def each(self, matrix: AdjacencyMatrix) -> Iterator[tuple[list[int], int, int]]:
        """Tail, salt and depth of each."""
        salts = matrix.salts[self.idx_mapping].tolist()
        tails = self.ends.tails(matrix.layout.reach)
        return zip(tails, salts, self.max_depths, strict=True)


@dataclass(frozen=True, slots=True)
class Growth:
    """What was drafted for a batch.

    Attributes:
        token_ids: int64 [batch, nodes], -1 where there is no node.
        worths: floating [batch, nodes], of each node, 0 where there is none. The nodes of a grown
            tree are worth less and less; those of a template have its order.
        parents: int64 [batch, rows], the parent row of each node; the root is row 0.

    """

    token_ids: torch.Tensor
    worths: torch.Tensor
    parents: torch.Tensor

    @property
    def num_nodes(self) -> torch.Tensor:
        """int64 [batch], nodes of each tree that have a token."""
        return (self.token_ids != NO_TOKEN).sum(1)


def grow(
    matrix: AdjacencyMatrix,
    rates: torch.Tensor,
    texts: TextEnds,
    *,
    max_nodes: int,
    least_worth: float = 0.0,
    ranks: int | None = None,
    beam: int | None = None,
    levels: int | None = None,
) -> Growth:
    """Grow a tree below the last token of each text, best first.

    The node that is worth the most is added again and again; of equal ones the one of the least
    depth, then of the first parent, then of the lowest rank. A node is worth no more than its
    parent, so that nodes come parents first, and any prefix of them is a tree. Along the trunk of
    a draft model its choices are nodes too, in the place of the last successors of an entry there;
    the other ones share the chance that these leave.

    What a grammar forbids is passed over, so that the next one has its chance. What it expects has
    the chance that the others leave, all of it where nothing else is allowed.

    Args:
        matrix: what is drafted from.
        rates: floating [contexts, 2, k, 4], each from 0 to 1, see `AcceptanceTable.rates`.
        texts: of each of which a tree is grown.
        max_nodes: the most nodes of a tree.
        least_worth: nodes that are worth no more than this are left out, and all below them.
        ranks: the most successors of a row that are nodes below it, the first ones; None for any.
        beam: the most nodes of a level that have nodes below them, the best ones; None for any.
        levels: the most levels of any tree; None for any number.

    """
    batch = len(texts.idx_mapping)
    token_ids = torch.full((batch, max_nodes), NO_TOKEN)
    worths = torch.zeros(batch, max_nodes, dtype=rates.dtype)
    parents = torch.zeros(batch, max_nodes + 1, dtype=torch.int64)
    for b, (tail, salt, max_depth) in enumerate(texts.each(matrix)):
        depth = max_depth if levels is None else min(levels, max_depth)
        # The root, and then the nodes; place is that on the trunk, or NO_PLACE.
        contexts, depths, row_worths, places = [tail], [0], [1.0], [0]
        paths: list[tuple[int, ...]] = [()]
        num_expanded, heap = Counter[int](), list[tuple[float, int, int, int, int, int]]()
        while True:
            row = len(contexts) - 1
            level, above = depths[row], row_worths[row]
            if level < depth and num_expanded[level] != beam:
                num_expanded[level] += 1
                offered = {} if texts.trunks is None else texts.trunks.at(b, places[row])
                following = _following(matrix, rates, contexts[row], salt, offered)
                if (allowed := texts.allowed(b, paths[row])) is not None:
                    following = _what_is_allowed(following, allowed)
                following = following[:ranks]
                chances = torch.tensor([chance for _, chance in following], dtype=rates.dtype)
                below = zip(following, (above * chances).tolist(), strict=True)
                for rank, ((token, _), worth) in enumerate(below):
                    if worth > least_worth:
                        goes_on = token == next(iter(offered), None)
                        place = places[row] + 1 if goes_on else NO_PLACE
                        heapq.heappush(heap, (-worth, level + 1, row, rank, token, place))
            if not heap or row == max_nodes:
                break
            negative, level, parent, _, token, place = heapq.heappop(heap)
            token_ids[b, row], worths[b, row], parents[b, row + 1] = token, -negative, parent
            contexts.append([token, *contexts[parent]][: matrix.layout.reach])
            paths.append((*paths[parent], token))
            depths.append(level)
            places.append(place)
            row_worths.append(-negative)
    return Growth(token_ids, worths, parents)


def fill(
    matrix: AdjacencyMatrix, rates: torch.Tensor, texts: TextEnds, *, tree: TreeTemplate
) -> Growth:
    """Fill a template below the last token of each text (Token Recycling, section 3.2).

    Node `(parent, rank)` has the successor of that rank after the parent's context. It has none
    where too few are known, and below such a node; nodes keep their places in the template.

    Args:
        matrix, rates, texts: as for `grow`.
        tree: the template; its ranks are below k.

    """
    batch = len(texts.idx_mapping)
    depths = tree.depths.tolist()
    token_ids = torch.full((batch, tree.num_nodes), NO_TOKEN)
    worths = torch.zeros(batch, tree.num_nodes, dtype=rates.dtype)
    for b, (tail, salt, max_depth) in enumerate(texts.each(matrix)):
        contexts = {0: tail}  # of the rows that have a token
        known: dict[int, dict[int, tuple[int, float]]] = {}  # successors of a row, by rank
        for node, (parent, rank) in enumerate(tree.nodes):
            if parent not in contexts or depths[node + 1] > max_depth:
                continue
            if parent not in known:
                worth = 1.0 if parent == 0 else float(worths[b, parent - 1])
                found = _successors(matrix, rates, contexts[parent], salt)
                known[parent] = {place: (token, worth * rate) for place, token, rate in found}
            if rank in known[parent]:
                token_ids[b, node], worths[b, node] = token, _ = known[parent][rank]
                contexts[node + 1] = [token, *contexts[parent]][: matrix.layout.reach]
    return Growth(token_ids, worths, tree.parents.expand(batch, -1))


def _following(
    matrix: AdjacencyMatrix,
    rates: torch.Tensor,
    context: list[int],
    salt: int,
    offered: dict[int, float],
) -> list[tuple[int, float]]:
    """What may follow a context, and the chance of each; with what is offered, best first."""
    found = _successors(matrix, rates, context, salt)
    ranks = matrix.layout.k - len(offered)
    successors = [(token, rate) for rank, token, rate in found if rank < ranks]
    if not offered:
        return successors
    left = max(0.0, 1.0 - sum(offered.values()))
    others = 1.0 - sum(rate for token, rate in successors if token in offered)
    # In the precision of rates, as twins have it.
    share = rates.new_tensor(left) / max(left, others) if left else 0.0
    rest = [(token, float(share * rate)) for token, rate in successors if token not in offered]
    return sorted([*offered.items(), *rest], key=lambda pair: -pair[1])


def _what_is_allowed(
    following: list[tuple[int, float]], allowed: Allowed
) -> list[tuple[int, float]]:
    """What may follow under a grammar, and the chance of each; see `grow`."""
    tokens = [token for token, _ in following if allowed.has(token)]
    following = list(zip(tokens, (chance for _, chance in following), strict=False))
    if allowed.expected == NO_TOKEN:
        return following
    others, left = [pair for pair in following if pair[0] != allowed.expected], 1.0
    for _, chance in others:  # not `sum`, which rounds otherwise from Python 3.12 on
        left -= chance
    return sorted([*others, (allowed.expected, max(0.0, left))], key=lambda pair: -pair[1])


def _successors(
    matrix: AdjacencyMatrix, rates: torch.Tensor, context: list[int], salt: int
) -> Iterator[tuple[int, int, float]]:
    """Rank and token of what may follow a context by its entry, and how often it is right."""
    found = matrix.find_entry(context, salt, rates)
    if found is None:
        return
    address, index, own = found
    head, *successors, _ = matrix.table[address].tolist()
    of_ranks = rates[index, own, :, head & 3].tolist()
    for rank, (token, rate) in enumerate(zip(successors, of_ranks, strict=True)):
        if token != NO_TOKEN:
            yield rank, token, rate
