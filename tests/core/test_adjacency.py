"""The adjacency matrix: against a model that keeps whole contexts, and who sees what."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.recycling_steps import (
    VOCAB,
    K,
    address_of,
    make_matrix,
    seen,
    started,
    write,
    write_entries,
)
from tests.core.strategies import BRIEF
from vllm_recycle.core import adjacency, owners
from vllm_recycle.core.adjacency import SCOPES, slots_in
from vllm_recycle.core.learn import seed
from vllm_recycle.core.owners import MAX_SALT, Owner

CONTEXTS = (1, 2, 4)

Key = tuple[int, tuple[int, ...]]  # salt, 0 for all; the tokens of a context


@dataclass
class Model:
    """What a table of these addresses does that knows whole contexts, not tags of them."""

    scope: str
    entries: dict[int, tuple[Key, list[int], int]] = field(default_factory=dict)

    def places(self, layout, context: list[int], salt: int) -> list[tuple[Key, int]]:
        return [
            ((salt if own else 0, tuple(context[: layout.contexts[index]])), address)
            for index, own, address, _ in layout.each_address(context, salt)
            if self.scope != ("shared" if own else "isolated")
        ]

    def write(self, layout, context: list[int], salt: int, successors: list[int]) -> None:
        for key, address in self.places(layout, context, salt):
            old_key, old, steadiness = self.entries.get(address, (None, [-1], 0))
            stays = old_key == key and old[0] == successors[0]
            steadiness = min(3, steadiness + 1) if stays else 0
            self.entries[address] = (key, successors, steadiness)

    def find(self, layout, context: list[int], salt: int) -> tuple[Key, list[int], int] | None:
        places = self.places(layout, context, salt)
        known = [self.entries[at] for key, at in places if self.entries.get(at, (None,))[0] == key]
        return max(known, key=lambda entry: (len(entry[0][1]), entry[0][0]), default=None)


tokens = st.integers(0, 3)
contexts = st.lists(tokens, min_size=1, max_size=4)
events = st.tuples(
    st.integers(0, 1), contexts, st.lists(tokens, min_size=K, max_size=K), st.integers(0, 9)
)


@pytest.mark.parametrize("scope", SCOPES)
@BRIEF
@given(slots=st.sampled_from([1, 2, 8, 512]), events=st.lists(events, max_size=15), other=contexts)
def test_what_is_found_is_what_was_written_for_this_very_context(scope, slots, events, other):
    model = Model(scope)
    matrix = started(scope, contexts=CONTEXTS, slots=slots)
    layout = matrix.layout
    for req_state_idx, context, successors, what in events:
        if what == 0:  # the request ends, and another one takes its place
            matrix.begin(req_state_idx)
        write(matrix, req_state_idx, context, successors)
        model.write(layout, context, int(matrix.salts[req_state_idx]), successors)
    assert matrix.num_written == len(model.entries)
    for context in [other, *(context for _, context, _, _ in events)]:
        for salt in matrix.salts[:2].tolist():
            expected = model.find(layout, context, salt)
            found = matrix.longest_entries(context, salt)
            assert bool(found) == (expected is not None)
            if found:
                key, successors, steadiness = expected
                address, index, own = found[-1]
                assert (layout.contexts[index], own) == (len(key[1]), key[0] > 0)
                assert matrix.table[address, 1:-1].tolist() == successors
                assert int(matrix.table[address, 0]) & 3 == steadiness


# Where entries are.


@BRIEF
@given(context=contexts, salt=st.integers(1, MAX_SALT), slots=st.sampled_from([1, 2, 64]))
def test_the_shared_entries_of_one_token_lie_by_token_and_all_others_behind_them(
    context, salt, slots
):
    matrix = make_matrix(contexts=CONTEXTS, slots=slots)
    places = list(matrix.layout.each_address(context, salt))
    lengths = [length for length in CONTEXTS if length <= len(context)]
    assert [place[:2] for place in places] == [
        (index, own) for index in range(len(lengths)) for own in (0, 1)
    ]
    assert places[0][2] == context[0]
    assert all(VOCAB <= address < VOCAB + slots for _, _, address, _ in places[1:])
    assert all(0 <= head < 2**31 and head & 3 == 0 for _, _, _, head in places)
    assert [head >> 2 & 1 for _, _, _, head in places] == [own for _, own, _, _ in places]


def test_a_context_ends_where_the_text_begins():
    layout = make_matrix(contexts=CONTEXTS).layout
    of_two = list(layout.each_address([3, 1], 1))
    assert list(layout.each_address([3, 1, -1, -1], 1)) == of_two
    assert list(layout.each_address([-1, -1, -1, -1], 1)) == []


def test_slots_fill_what_there_is_room_for_and_no_more():
    for mib in (1, 3, 64):
        for k in (1, 3, 8):
            slots, entry_bytes = slots_in(mib, k), 4 * (2 + k)
            assert slots & (slots - 1) == 0
            assert slots * entry_bytes <= mib * adjacency.MIB < 2 * slots * entry_bytes


# Which entry is drafted from.


@pytest.mark.parametrize(("shared_rate", "own_rate"), [(0.5, 0.4), (0.4, 0.5), (0.5, 0.5)])
def test_of_a_shared_and_an_own_entry_the_surer_one_is_found(shared_rate, own_rate):
    matrix = started(contexts=(1, 2))
    rates = torch.zeros(2, 2, K, 4)
    rates[1, :, 0, 0] = torch.tensor([shared_rate, own_rate])
    rates[0, :, :] = rates[:, :, 1:] = rates[:, :, :, 1:] = 0.9  # of other entries and ranks
    write(matrix, 1, [1, 2], [4] * K)
    write_entries(matrix, [1, 2], int(matrix.salts[0]), [3] * K, own=True, shared=False)
    address, index, own = matrix.find_entry([1, 2], int(matrix.salts[0]), rates)
    assert (index, own) == (1, own_rate >= shared_rate)
    assert matrix.table[address, 1:-1].tolist() == [3 if own else 4] * K
    # Longer ones come first, however sure they are.
    write_entries(matrix, [1], int(matrix.salts[0]), [5] * K, own=True, shared=True)
    assert matrix.find_entry([1, 2], int(matrix.salts[0]), rates)[1] == 1


# Who sees what.

ACME, OTHER, SALTED = Owner("acme"), Owner("other"), Owner("acme", "salt")


def write_own(matrix, req_state_idx: int, context: list[int], successor: int) -> None:
    salt = int(matrix.salts[req_state_idx])
    write_entries(matrix, context, salt, [successor] * K, own=True, shared=False)


def test_requests_have_one_salt_where_they_have_one_owner_that_is_known(monkeypatch):
    def salts(*given: Owner | None) -> list[int]:
        """Numbers that are equal where salts are."""
        matrix, found = make_matrix(), []
        for number, owner in enumerate(given):
            matrix.begin(number % 3, owner=owner)
            found.append(int(matrix.salts[number % 3]))
        assert min(found) > 0
        return [found.index(salt) for salt in found]

    assert salts(*[None] * 6) == [*range(6)]
    assert salts(ACME, OTHER, ACME, SALTED, ACME, SALTED) == [0, 1, 0, 3, 0, 3]
    # An integer is another owner than its digits.
    assert salts(Owner(1), Owner("1")) == [0, 1]
    # The owner that was not seen for longest is forgotten.
    monkeypatch.setattr(owners, "MAX_OWNERS", 2)
    assert salts(ACME, OTHER, ACME, Owner("third"), ACME, OTHER) == [0, 1, 0, 3, 0, 5]
    # Sessions, of which there are ever new ones, make no other owner be forgotten.
    sessions = [Owner(str(number), is_session=True) for number in range(3)]
    assert salts(ACME, *sessions, ACME, sessions[2], sessions[0]) == [0, 1, 2, 3, 0, 3, 6]


def test_requests_of_one_owner_find_what_earlier_ones_wrote_and_nobody_else_does():
    matrix = make_matrix()
    matrix.begin(0, owner=ACME)
    write_own(matrix, 0, [1, 2], 3)
    for owner in (None, OTHER, SALTED, ACME):
        matrix.begin(0, owner=owner)
        assert seen(matrix, 0, [1, 2]) == ([3] * K if owner == ACME else None)


@pytest.mark.parametrize("scope", ["sequence", "shared"])
def test_with_a_cache_salt_nothing_is_shared(scope):
    matrix = make_matrix(scope)
    matrix.begin(0, owner=SALTED)
    # What is nobody's is shared though a private request ran last.
    seed(matrix.of_all(), 0, torch.tensor([5, 6]))
    before = matrix.shared_entries()
    matrix.begin(1)
    write(matrix, 0, [1, 2], [3] * K)
    assert matrix.shared_entries().equal(before)
    write(matrix, 1, [2, 2], [4] * K)
    found = [[seen(matrix, b, context) for context in ([1, 2], [2, 2], [5])] for b in (0, 1)]
    own = [3] * K if scope == "sequence" else None
    assert found == [[own, None, None], [None, [4] * K, [6, *[-1] * (K - 1)]]]


def test_what_is_forgotten_is_gone_for_those_that_run_too():
    matrix = make_matrix()
    for req_state_idx, owner in enumerate((ACME, SALTED, OTHER)):
        matrix.begin(req_state_idx, owner=owner)
        write_own(matrix, req_state_idx, [1], 3)
    assert (matrix.forget(["nobody"]), matrix.num_written) == (0, 3)
    assert (matrix.forget(["acme"]), matrix.num_written) == (2, 1)
    assert [seen(matrix, req_state_idx, [1]) for req_state_idx in range(3)] == [None, None, [3] * K]
    write_own(matrix, 0, [1], 4)
    assert seen(matrix, 0, [1]) == [4] * K
    for owner in (ACME, SALTED):
        matrix.begin(2, owner=owner)
        assert seen(matrix, 2, [1]) is None


def test_isolated_requests_do_not_read_shared_entries():
    matrix = started("isolated")
    shared = copy.copy(matrix)
    shared.layout = replace(matrix.layout, has_shared=True)
    write_entries(shared, [2, 1], 0, [4] * K, own=False, shared=True)
    assert matrix.num_written == 2
    assert seen(matrix, 0, [2, 1]) is None


@BRIEF
@given(
    ones=st.lists(contexts, min_size=1, max_size=4),
    others=st.lists(contexts, max_size=20),
    slots=st.sampled_from([1, 8, 64]),
)
def test_an_isolated_request_keeps_and_finds_its_entries_whatever_others_write(ones, others, slots):
    found = []
    for busy in (False, True):
        matrix = make_matrix("isolated", contexts=CONTEXTS, slots=slots)
        for req_state_idx in (1, 2, 1, 0) if busy else (0,):
            matrix.begin(req_state_idx)
        for context in ones:
            write(matrix, 0, context, [3] * K)
        for number, context in enumerate(others if busy else ()):
            write(matrix, 1 + number % 2, context, [4] * K)
        salt = int(matrix.salts[0])
        found.append([matrix.longest_entries(context, salt) for context in ones])
        assert all(seen(matrix, 0, context) in (None, [3] * K) for context in ones)
    assert found[0] == found[1]


def test_there_is_a_part_for_each_isolated_request():
    for requests, slots, parts in ((1, 8, 1), (3, 8, 4), (4, 2, 4), (5, 64, 8)):
        layout = make_matrix("isolated", max_num_reqs=requests, slots=slots).layout
        assert (layout.parts, layout.slots) == (parts, max(slots, parts))
        assert make_matrix(max_num_reqs=requests, slots=slots).layout.parts == 1


def test_the_shared_entries_are_a_copy_without_own_ones():
    matrix = started()
    write(matrix, 0, [1, 2], [3] * K)
    shared = matrix.shared_entries()
    assert (shared[:, 0] >= 0).sum() == 2
    assert matrix.num_written == 4
    address = address_of(matrix.layout, [1, 2], 1, own=False)
    assert shared[address].equal(matrix.table[address])
    shared.fill_(0)
    assert seen(matrix, 0, [1, 2]) == [3] * K
    matrix.clear()
    assert matrix.num_written == 0


# Writing.


def test_steadiness_counts_to_three_and_falls_when_the_first_successor_changes():
    matrix = started("shared")
    steadiness = []
    for successors in [[2, 3, 4], [2, 4, 3], [2, 3, 4], [2, 3, 4], [2, 0, 1], [3, 2, 4], [3, 2, 4]]:
        write(matrix, 0, [1], successors)
        steadiness.append(int(matrix.table[1, 0]) & 3)
    assert steadiness == [0, 1, 2, 3, 3, 0, 1]
