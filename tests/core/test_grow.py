"""Growing and filling trees: against a search without a heap, and against a template by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from tests.core.growth_settings import (
    TOKENS,
    Setting,
    settings_of_growth,
    some_grammars,
    some_trunks,
)
from tests.core.recycling_steps import K
from tests.core.strategies import BRIEF, THOROUGH
from tests.core.strategies import trees as templates
from vllm_recycle.core.grow import fill


def successors_of(setting: Setting, b: int, text: list[int]) -> dict[int, tuple[int, float]]:
    """By rank, what may follow a text of a request: the token, and how often that is right."""
    matrix = setting.matrix
    rates = setting.rates[matrix.classes[b]]
    found = matrix.find_entry(text[::-1], int(matrix.salts[b]), rates)
    if found is None:
        return {}
    address, length, own = found
    head, *successors, _ = matrix.table[address].tolist()
    of_ranks = rates[length, own, :, head & 3].tolist()
    pairs = enumerate(zip(successors, of_ranks, strict=True))
    return {rank: pair for rank, pair in pairs if pair[0] != -1}


@dataclass
class Candidate:
    worth: float
    depth: int
    parent: int
    rank: int
    text: list[int]
    place: int | None  # on the trunk


def offers_of(setting: Setting, b: int, place: int | None) -> list[tuple[int, float]]:
    """The draft model's choices at a place of the trunk, and the chance of each."""
    if setting.trunks is None or place is None or place >= setting.trunks.token_ids.shape[1]:
        return []
    token_ids, chances = (values[b, place].tolist() for values in setting.trunks)
    return [pair for pair in zip(token_ids, chances, strict=True) if pair[0] >= 0]


def following(setting: Setting, b: int, above: Candidate) -> list[tuple[int, float, int | None]]:
    """What may follow a node, the chance of each and its place on the trunk."""
    found = without_grammar(setting, b, above)
    grammar = setting.grammars and setting.grammars[b]
    allowed = grammar and grammar.allowed(above.text[len(setting.texts[b]) :])
    if not allowed:
        return found
    kept = [(token, place) for token, _, place in found if int(allowed.words[0]) >> token & 1]
    pairs = zip(kept, found, strict=False)
    found = [(token, chance, place) for (token, place), (_, chance, _) in pairs]
    if allowed.expected < 0:
        return found
    place = next((place for token, _, place in found if token == allowed.expected), None)
    found = [one for one in found if one[0] != allowed.expected]
    left = 1.0
    for _, chance, _ in found:
        left -= chance
    return sorted([*found, (allowed.expected, max(0.0, left), place)], key=lambda one: -one[1])


def without_grammar(
    setting: Setting, b: int, above: Candidate
) -> list[tuple[int, float, int | None]]:
    """The same where all is allowed."""
    offers = offers_of(setting, b, above.place)
    of_rank = successors_of(setting, b, above.text)
    known = [of_rank[rank] for rank in sorted(of_rank) if rank < K - len(offers)]
    if not offers:
        return [(token, rate, None) for token, rate in known]
    _, _, own = setting.matrix.find_entry(
        above.text[::-1],
        int(setting.matrix.salts[b]),
        setting.rates[setting.matrix.classes[b]],
    ) or (0, 0, 1)
    first, second = dict(offers), dict(known)
    if not own and known and known[0][1] > offers[0][1]:  # the matrix is surer
        first, second = second, first
    left = 1.0 - sum(first.values())
    unknown = 1.0 - sum(chance for token, chance in second.items() if token in first)
    share = left / max(left, unknown) if left > 0 else 0.0
    found = [
        (token, first.get(token, second.get(token, 0.0) * share), None)
        for token in dict.fromkeys([*dict(offers), *dict(known)])
    ]
    found[0] = (*found[0][:2], above.place + 1)
    return sorted(found, key=lambda one: one[1], reverse=True)


def best_first(setting: Setting, b: int) -> list[Candidate]:
    """The nodes of a request: of all that could be added, always the one worth the most."""
    added: list[Candidate] = []
    candidates: list[Candidate] = []
    expanded: list[int] = []
    most = min(setting.max_depths[b], TOKENS**4 if setting.levels is None else setting.levels)
    above = Candidate(1.0, 0, 0, 0, setting.texts[b], 0)
    while True:
        if above.depth < most and expanded.count(above.depth) != setting.beam:
            expanded.append(above.depth)
            for rank, (token, rate, place) in enumerate(following(setting, b, above)):
                worth, text = above.worth * rate, [*above.text, token]
                below = (above.depth + 1, len(added), rank, text, place)
                candidates.append(Candidate(worth, *below))
        candidates = [candidate for candidate in candidates if candidate.worth > 0]
        if not candidates or len(added) == setting.max_nodes:
            return added
        above = min(candidates, key=lambda c: (-c.worth, c.depth, c.parent, c.rank))
        candidates.remove(above)
        added.append(above)


limits = st.none() | st.integers(1, 5)


@THOROUGH
@given(setting=settings_of_growth(), beam=limits, levels=limits, data=st.data())
def test_what_is_grown_is_a_best_first_search(setting, beam, levels, data):
    trunks = data.draw(st.none() | some_trunks(len(setting.texts)))
    grammars = data.draw(some_grammars(len(setting.texts)))
    # What a trunk leaves to others is shared: no eighths any more.
    setting = replace(setting, rates=setting.rates.double(), trunks=trunks, grammars=grammars)
    setting = replace(setting, beam=beam, levels=levels)
    growth = setting.grow()
    assert growth.worths.dtype == setting.rates.dtype
    for b in range(len(setting.texts)):
        nodes = best_first(setting, b)
        padding = setting.max_nodes - len(nodes)
        assert int(growth.num_nodes[b]) == len(nodes)
        assert growth.parents[b].tolist() == [0, *(c.parent for c in nodes), *[0] * padding]
        assert growth.token_ids[b].tolist() == [*(c.text[-1] for c in nodes), *[-1] * padding]
        assert growth.worths[b].tolist() == [*(c.worth for c in nodes), *[0.0] * padding]


@BRIEF
@given(setting=settings_of_growth(), least=st.integers(0, 8))
def test_worthier_nodes_are_a_prefix_of_all(setting, least):
    setting = replace(setting, beam=None)
    growth, worthier = setting.grow(), setting.grow(least_worth=least / 8)
    assert worthier.worths.equal(growth.worths.where(growth.worths > least / 8, 0))
    assert worthier.token_ids.equal(growth.token_ids.where(growth.worths > least / 8, -1))


@THOROUGH
@given(setting=settings_of_growth(), tree=templates(max_nodes=12, k=K))
def test_a_template_has_the_successors_that_its_ranks_say(setting, tree):
    growth = fill(*setting.arguments, tree=tree)
    assert growth.parents.equal(tree.parents.expand(len(setting.texts), -1))
    for b, text in enumerate(setting.texts):
        rows: dict[int, tuple[list[int], float]] = {0: (text, 1.0)}
        for row, (parent, rank) in enumerate(tree.nodes, start=1):
            above, worth = rows.get(parent, ([], 0.0))
            known = successors_of(setting, b, above) if above else {}
            if rank in known and tree.depths[row] <= setting.max_depths[b]:
                token, rate = known[rank]
                rows[row] = ([*above, token], worth * rate)
        expected = [rows.get(row, ([-1], 0.0)) for row in range(1, tree.num_nodes + 1)]
        assert growth.token_ids[b].tolist() == [tokens[-1] for tokens, _ in expected]
        assert growth.worths[b].tolist() == [worth for _, worth in expected]
        assert int(growth.num_nodes[b]) == len(rows) - 1
