"""Drafting from the adjacency matrix: trees grown best first, and templates filled.

A node is worth the chance that it is accepted: the product of the acceptance rates along its path.
How many nodes of a tree are verified is not decided here, see `choose.choose`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from vllm_recycle.core.adjacency import AdjacencyMatrix, Ends
from vllm_recycle.core.grammar import Allowed, Grammar, keep_allowed
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.core.verification import NO_TOKEN

# Trees that a device grows: nodes of a level that are expanded. And the most levels where a draft
# model reads what may have been accepted, and of chains for requests that look back.
BEAM = 16
LEVELS = 16
NO_PLACE = -1


def bounded(chances: torch.Tensor) -> torch.Tensor:
    """Chances from 0 to 1, whatever they were; no number is 0.

    So no node is worth more than its parent, which trees rely on.
    """
    return chances.nan_to_num(nan=0.0).clamp(0.0, 1.0)


class Trunks(NamedTuple):
    """What a draft model says below each text: a chain, and other choices beside its tokens.

    Attributes:
        token_ids: int64 [batch, gamma, choices], what it finds most probable behind the text and
            the first choices before, best first; these are the trunk. -1 behind its end.
        chances: float64 [batch, gamma, choices], that each is right where the trunk before it is.

    """

    token_ids: torch.Tensor
    chances: torch.Tensor

    @property
    def promises(self) -> torch.Tensor:
        """float64 [batch], tokens of each trunk that are expected to be right."""
        return self.chances[:, :, 0].double().cumprod(dim=1).sum(dim=1)

    def surer(self, peer: Trunks) -> Trunks:
        """Of each text the trunk that promises more tokens, these where both promise the same."""
        _, length, choices = map(max, self.token_ids.shape, peer.token_ids.shape)
        is_surer = (self.promises >= peer.promises)[:, None, None]
        pairs = zip(self._padded(length, choices), peer._padded(length, choices), strict=True)
        return Trunks._make(values.where(is_surer, peer_values) for values, peer_values in pairs)

    def _padded(self, length: int, choices: int) -> Trunks:
        _, old_length, old_choices = self.token_ids.shape
        sizes = (0, choices - old_choices, 0, length - old_length)
        return Trunks(pad(self.token_ids, sizes, value=NO_TOKEN), pad(self.chances, sizes))

    def at(self, b: int, place: int) -> dict[int, float]:
        """The choices at a place of a trunk, and their chances; none behind its end."""
        if not 0 <= place < self.token_ids.shape[1]:
            return {}
        token_ids, chances = self.token_ids[b, place], bounded(self.chances[b, place])
        pairs = zip(token_ids.tolist(), chances.tolist(), strict=True)
        return {token: chance for token, chance in pairs if token != NO_TOKEN}


@dataclass(frozen=True, slots=True)
class TextEnds:
    """Texts of requests, and how far is drafted below them.

    Attributes:
        idx_mapping: int64 [batch].
        ends: of the texts.
        max_depths: of each the most levels of its tree below the root.
        trunks: None where there are none.
        grammars: of each text the one that it follows, or None; None where no text has one.

    """

    idx_mapping: torch.Tensor
    ends: Ends
    max_depths: Sequence[int]
    trunks: Trunks | None = None
    grammars: Sequence[Grammar | None] | None = None

    def only(self, index: int) -> TextEnds:
        """One of these."""
        span, ends = slice(index, index + 1), self.ends
        is_token = None if ends.is_token is None else ends.is_token[span]
        ends = Ends(ends.token_ids[span], ends.last_positions[span], is_token)
        trunks = self.trunks and Trunks(*(values[span] for values in self.trunks))
        grammars = self.grammars and self.grammars[span]
        return TextEnds(self.idx_mapping[span], ends, self.max_depths[span], trunks, grammars)

    def allowed(self, b: int, path: Sequence[int]) -> Allowed | None:
        """See `Grammar.allowed`."""
        grammar = self.grammars and self.grammars[b]
        return grammar.allowed(path) if grammar else None

    def each(
        self, matrix: AdjacencyMatrix, rates: torch.Tensor
    ) -> Iterator[tuple[list[int], Reader, int]]:
        """The tail of each text, what reads the matrix for it, and the depth of its tree."""
        salts, classes = matrix.salts[self.idx_mapping], matrix.classes[self.idx_mapping]
        rates = bounded(rates)
        readers = [
            Reader(matrix, rates[request_class], salt)
            for salt, request_class in zip(salts.tolist(), classes.tolist(), strict=True)
        ]
        tails = self.ends.tails(matrix.layout.reach)
        return zip(tails, readers, self.max_depths, strict=True)


class Reader(NamedTuple):
    """Reads the matrix for one sequence.

    Attributes:
        matrix: that is read.
        rates: floating [contexts, 2, k, 4], those of the class of the sequence.
        salt: of the sequence.

    """

    matrix: AdjacencyMatrix
    rates: torch.Tensor
    salt: int

    def successors(self, context: list[int]) -> tuple[list[tuple[int, int, float]], bool]:
        """Rank and token of what may follow a context by its entry, and how often it is right.

        And whether the entry is shared.
        """
        entry = self.matrix.find_entry(context, self.salt, self.rates)
        if entry is None:
            return [], False
        address, index, own = entry
        head, *tokens, _ = self.matrix.table[address].tolist()
        pairs = zip(tokens, self.rates[index, own, :, head & 3].tolist(), strict=True)
        rows = [(rank, *pair) for rank, pair in enumerate(pairs) if pair[0] != NO_TOKEN]
        return rows, not own

    def following(self, context: list[int], choices: dict[int, float]) -> list[tuple[int, float]]:
        """What may follow a context, and the chance of each; with what is offered, best first.

        The choices are believed, but a shared entry is where its first token is right more often
        than the first choice. An entry of its own knows no more of a text than a copy. The tokens
        that only the other one has share the chance that is left.
        """
        rows, is_shared = self.successors(context)
        ranks = self.matrix.layout.k - len(choices)
        successors = {token: rate for rank, token, rate in rows if rank < ranks}
        if not choices:
            return [*successors.items()]
        believed, others = choices, successors
        if is_shared and next(iter(successors.values()), 0.0) > next(iter(choices.values())):
            believed, others = successors, choices
        rest_chance = rest_rate = 1.0
        for chance in believed.values():
            rest_chance -= chance
        for token in successors:
            rest_rate -= others[token] if token in choices else 0.0
        rest_chance = max(0.0, rest_chance)
        # In the precision of rates, as twins have it.
        share = rest_chance and self.rates.new_tensor(rest_chance) / max(rest_chance, rest_rate)
        chances = {token: float(share * chance) for token, chance in others.items()} | believed
        tokens = dict.fromkeys([*choices, *successors])
        return sorted([(token, chances[token]) for token in tokens], key=lambda pair: -pair[1])


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
    a draft model its choices are nodes too, in the place of the last successors of an entry there.
    `Reader.following` says which of the two is believed.

    What a grammar forbids is passed over, so that the next one has its chance. What it expects has
    the chance that the others leave, all of it where nothing else is allowed.

    Args:
        matrix: what is drafted from.
        rates: floating [classes, contexts, 2, k, 4], from 0 to 1, see `AcceptanceTable.rates`.
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
    for b, (tail, reader, max_depth) in enumerate(texts.each(matrix, rates)):
        depth = max_depth if levels is None else min(levels, max_depth)
        rows = [_Row(1.0, 0, (), 0)]  # the root, and then the nodes
        num_expanded, candidates = Counter[int](), list[_Candidate]()
        while True:
            last_row = rows[-1]
            if last_row.depth < depth and num_expanded[last_row.depth] != beam:
                num_expanded[last_row.depth] += 1
                followers = _following(reader, texts, b, tail, last_row)
                children = _children(last_row, len(rows) - 1, followers[:ranks], rates)
                for candidate in children:
                    if -candidate.negative_worth > least_worth:
                        heapq.heappush(candidates, candidate)
            if not candidates or len(rows) > max_nodes:
                break
            best, node = heapq.heappop(candidates), len(rows) - 1
            token_ids[b, node], worths[b, node] = best.token, -best.negative_worth
            parents[b, node + 1] = best.parent
            path = (*rows[best.parent].path, best.token)
            rows.append(_Row(-best.negative_worth, best.depth, path, best.place))
    return Growth(token_ids, worths, parents)


class _Row(NamedTuple):
    """The root, or a node that was added."""

    worth: float
    depth: int
    path: tuple[int, ...]  # tokens from the root to it
    place: int  # on the trunk, or NO_PLACE


class _Candidate(NamedTuple):
    """A node that may be added; the least one is added first."""

    negative_worth: float
    depth: int
    parent: int
    rank: int
    token: int
    place: int


def _following(
    reader: Reader, texts: TextEnds, b: int, tail: list[int], row: _Row
) -> list[tuple[int, float, int]]:
    """What may follow a row of a text, best first: token, chance, and place on the trunk."""
    choices = {} if texts.trunks is None else texts.trunks.at(b, row.place)
    context = [*row.path[::-1], *tail][: reader.matrix.layout.reach]
    followers = reader.following(context, choices)
    if (allowed := texts.allowed(b, row.path)) is not None:
        followers = keep_allowed(followers, allowed)
    on_trunk = next(iter(choices), None)
    return [
        (token, chance, row.place + 1 if token == on_trunk else NO_PLACE)
        for token, chance in followers
    ]


def _children(
    row: _Row, parent: int, followers: Sequence[tuple[int, float, int]], rates: torch.Tensor
) -> Iterator[_Candidate]:
    """What may be added below a row."""
    # In the precision of rates, as twins have it.
    chances = torch.tensor([chance for _, chance, _ in followers], dtype=rates.dtype)
    worths = (row.worth * chances).tolist()
    for rank, ((token, _, place), worth) in enumerate(zip(followers, worths, strict=True)):
        yield _Candidate(-worth, row.depth + 1, parent, rank, token, place)


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
    for b, (tail, reader, max_depth) in enumerate(texts.each(matrix, rates)):
        contexts = {0: tail}  # of the rows that have a token
        children: dict[int, dict[int, tuple[int, float]]] = {}  # successors of a row, by rank
        for node, (parent, rank) in enumerate(tree.nodes):
            if parent not in contexts or depths[node + 1] > max_depth:
                continue
            if parent not in children:
                worth = 1.0 if parent == 0 else float(worths[b, parent - 1])
                successors, _ = reader.successors(contexts[parent])
                children[parent] = {rank: (token, worth * rate) for rank, token, rate in successors}
            if rank in children[parent]:
                token_ids[b, node], worths[b, node] = token, _ = children[parent][rank]
                contexts[node + 1] = [token, *contexts[parent]][: matrix.layout.reach]
    return Growth(token_ids, worths, tree.parents.expand(batch, -1))
