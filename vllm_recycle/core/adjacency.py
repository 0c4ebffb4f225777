"""The adjacency matrix: the target's last top-k after each token, and after longer contexts.

Token Recycling (arXiv 2408.08696, section 3.1) keeps the successors of each single token. That is
what this is with the contexts `[1]` and the scope `shared`; an entry of a longer context says what
followed the last n tokens. All entries are in one table:

    0 .. vocab - 1              what all sequences share of contexts of one token, by the token
    vocab .. vocab + slots - 1  everything else, by a hash of the context

An entry is `[head, successor 0 .. successor k - 1, salt]`, int32, best first, padded with -1. Its
head is `tag << 3 | own << 2 | steadiness`, or -1 where the entry was never written. The tag (the
token itself, or 28 bits of the hash that the place does not use) tells contexts of one place apart.
Where two agree by chance a draft is wrong, which costs a row of the step and never an output.
Steadiness is how many updates running, up to 3, left the first successor as it was.

What a sequence writes for itself (`own`) is hashed with its salt, a number that no other sequence
has, and carries it, so that no other sequence reads it; 0 is the salt of what is shared. When the
sequence has ended its entries are overwritten in time. Sequences of one owner have one salt, so
they read what earlier ones of it wrote. A private salt reads and writes nothing that is shared.
Under `isolated` each running sequence has a part of the slots for itself, since what another one
overwrites would be seen in the drafts: the salt, modulo the number of parts, says which.

Contexts go back from the newest token: a tail, of as many tokens as the longest context has, has
the last token of a text first, and -1 before the first one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from vllm_recycle.core.owners import MAX_SALT, PRIVATE_SALT, Owner, Owners

Scope = Literal["sequence", "shared", "isolated"]
SCOPES: tuple[str, ...] = get_args(Scope)
# In a head: the most of its steadiness, and the bit of entries that a sequence wrote for itself.
MAX_STEADINESS, OWN_BIT = 3, 4
MAX_CONTEXT = 16
MIB = 1 << 20
NEVER_WRITTEN = -1
# Classes of requests, which accept drafts differently: those that take the most probable token, and
# those that sample. Behind them the same of private salts, of which nothing is counted.
GREEDY, SAMPLED = 0, 1
NUM_COUNTED = 2
NUM_CLASSES = 2 * NUM_COUNTED
# Multipliers of the hash, odd: 2^64 divided by the golden ratio, and by other irrationals.
_MIX, _FINISH = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_64_BITS = (1 << 64) - 1
_TAG_SHIFT = 36  # the uppermost 28 bits; places are of the lower ones


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Where entries are, and who reads and writes them.

    Attributes:
        vocab_size: number of token ids.
        k: successors of an entry.
        contexts: lengths of contexts, ascending from 1.
        slots: entries that are found by a hash, a power of two.
        has_own: whether sequences write and read entries of their own.
        has_shared: whether they write and read entries of all.
        parts: parts of the slots, a power of two, each for one running sequence; 1 where all
            sequences share the slots.

    """

    vocab_size: int
    k: int
    contexts: tuple[int, ...]
    slots: int
    has_own: bool
    has_shared: bool
    parts: int = 1

    @property
    def width(self) -> int:
        """Numbers of an entry."""
        return 2 + self.k

    @property
    def reach(self) -> int:
        return self.contexts[-1]

    def each_address(
        self, context: Sequence[int], salt: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """Where the entries of a context are, for each of `contexts`, the shortest first.

        Args:
            context: tokens, the newest first; ends at `reach`, or at what is no token.
            salt: of the sequence, above 0.

        Yields:
            The index of the length, 1 for the own entry and 0 for the shared one before it, the
            address, and the head of the entry without its steadiness.

        """
        context_hash, num_hashed = 0, 0
        slots = self.slots // self.parts
        first_address = self.vocab_size + salt % self.parts * slots
        for index, length in enumerate(self.contexts):
            for token in context[num_hashed:length]:
                if not 0 <= token < self.vocab_size:
                    return
                context_hash = (context_hash ^ (token + 1)) * _MIX & _64_BITS
                context_hash ^= context_hash >> 32
            if len(context) < length:
                return
            num_hashed = length
            is_sharing = self.has_shared and salt < PRIVATE_SALT
            for own in range(1 - is_sharing, 1 + self.has_own):
                if length == 1 and not own:
                    yield index, 0, context[0], context[0] << 3
                    continue
                # A part has nothing of others, and places in it say nothing of others.
                hash_salt = salt if own and self.parts == 1 else 0
                key = (context_hash + hash_salt * _FINISH + length) * _FINISH & _64_BITS
                key = (key ^ key >> 29) * _MIX & _64_BITS
                head = (key >> _TAG_SHIFT) << 3 | own << 2
                yield index, own, first_address + (key & (slots - 1)), head


@dataclass(frozen=True, slots=True)
class Ends:
    """Where texts end.

    Attributes:
        token_ids: int32 [batch, length], of each text, and anything behind its end.
        last_positions: of each the place of its last token; -1 where there is none.
        is_token: bool [batch, length], which of these are tokens; None if all are.

    """

    token_ids: torch.Tensor
    last_positions: Sequence[int]
    is_token: torch.Tensor | None = None

    def tails(self, reach: int) -> list[list[int]]:
        """Of each text the last tokens, the newest first, -1 where there is none."""
        place = torch.tensor(self.last_positions)[:, None] - torch.arange(reach)
        is_token = place >= 0
        if self.is_token is not None:
            is_token &= self.is_token.gather(1, place.clamp(min=0))
        return self.token_ids.gather(1, place.clamp(min=0)).where(is_token, -1).tolist()


class AdjacencyMatrix:
    """The table, and the salts and classes of the running sequences.

    Args:
        vocab_size: below 2^28.
        k, contexts: see `MatrixLayout`.
        slots: a power of two below 2^36; under `isolated` at least one for each sequence.
        scope: who reads and writes what. `sequence`: each sequence writes its own entries and the
            shared ones, and reads both; `shared`: there are only shared entries; `isolated`: there
            are only own entries, so that no sequence sees what another one wrote.
        max_num_reqs: every `req_state_idx` is below this.
        device: where the table lives.

    """

    def __init__(
        self,
        vocab_size: int,
        k: int,
        *,
        contexts: Sequence[int],
        slots: int,
        scope: Scope = "sequence",
        max_num_reqs: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.scope = scope
        parts = 1 << (max_num_reqs - 1).bit_length() if scope == "isolated" else 1
        self.layout = MatrixLayout(
            vocab_size=vocab_size,
            k=k,
            contexts=tuple(contexts),
            slots=max(slots, parts),
            has_own=scope != "shared",
            has_shared=scope != "isolated",
            parts=parts,
        )
        shape = (vocab_size + self.layout.slots, self.layout.width)
        self.table = torch.empty(shape, dtype=torch.int32, device=device)
        self._num_begun = [0] * parts
        self._owners = Owners()
        self.salts = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.classes = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.clear()

    @property
    def num_written(self) -> int:
        """How many entries were ever written."""
        return int((self.table[:, 0] >= 0).sum())

    def clear(self) -> None:
        """Forget everything."""
        self.table.fill_(NEVER_WRITTEN)

    def begin(
        self, req_state_idx: int, request_class: int = GREEDY, owner: Owner | None = None
    ) -> None:
        """A sequence starts: it sees nothing that one of another owner wrote for itself.

        Args:
            req_state_idx: of the sequence.
            request_class: `GREEDY` or `SAMPLED`.
            owner: whose it is, under the scope `sequence`; None for nobody else's.

        """
        is_private = owner is not None and owner.cache_salt is not None
        salt = self._number(req_state_idx) if owner is None else self._owners.salt_of(owner)
        self.salts[req_state_idx] = salt
        self.classes[req_state_idx] = request_class + NUM_COUNTED * is_private

    def forget(self, names: Collection[str | int]) -> int:
        """Remove the own entries of owners, and return how many there were.

        Those of them that run go on without. What they wrote for all stays.
        """
        old_salts = self._owners.forget(names)
        if not old_salts:
            return 0
        for salt in old_salts:
            self.salts[self.salts == salt] = self._owners.new_salt(is_private=salt >= PRIVATE_SALT)
        salts = torch.tensor(old_salts, dtype=torch.int32, device=self.table.device)
        entries = torch.isin(self.table[:, -1], salts)
        self.table[entries] = NEVER_WRITTEN
        return int(entries.sum())

    def _number(self, req_state_idx: int) -> int:
        """A salt that no other sequence has; never 0, which is what is shared."""
        parts = self.layout.parts
        part = req_state_idx % parts
        self._num_begun[part] = self._num_begun[part] % (MAX_SALT // parts) + 1
        return self._num_begun[part] * parts + part

    def of_all(self) -> AdjacencyMatrix:
        """The same table for texts that are nobody's: what is seeded into it is shared.

        Raises ValueError under `isolated`, where nothing is.
        """
        if not self.layout.has_shared:
            raise ValueError(f"scope is {self.scope!r}, expected one with shared entries")
        view = copy(self)
        view.salts = torch.zeros_like(self.salts)
        view.layout = replace(self.layout, has_own=False)
        return view

    def shared_entries(self) -> torch.Tensor:
        """A copy of the table without what sequences wrote for themselves."""
        table = self.table.clone()
        heads = table[:, 0]
        table[(heads >= 0) & (heads & OWN_BIT != 0)] = NEVER_WRITTEN
        return table

    def find_entry(
        self, context: Sequence[int], salt: int, rates: torch.Tensor
    ) -> tuple[int, int, int] | None:
        """The entry to draft from: of the longest context that is known the surer one.

        That is the one whose first successor is right more often; of equal ones it is the own one.

        Args:
            context, salt: see `MatrixLayout.each_address`.
            rates: floating [contexts, 2, k, 4], those of its class, see `acceptance.rates`.

        Returns:
            Its address, the index of its length among `contexts`, and 1 for an own entry; None
            where nothing is known.

        """

        def rate(entry: tuple[int, int, int]) -> float:
            address, index, own = entry
            return float(rates[index, own, 0, int(self.table[address, 0]) & 3])

        return max(reversed(self.longest_entries(context, salt)), key=rate, default=None)

    def longest_entries(self, context: Sequence[int], salt: int) -> list[tuple[int, int, int]]:
        """The known entries of the longest context that is known, the shared one first."""
        entries = self.known_entries(context, salt)
        return [entry for entry in entries if entry[1] == entries[-1][1]]

    def known_entries(self, context: Sequence[int], salt: int) -> list[tuple[int, int, int]]:
        """All known entries of a context: shorter lengths first, of one length the shared entry.

        Each as `find_entry` returns it.
        """
        return [
            (address, index, own)
            for index, own, address, head in self.layout.each_address(context, salt)
            if self.is_written(address, head, salt if own else 0)
        ]

    def is_written(self, address: int, head: int, salt: int) -> bool:
        """Whether the entry there has this head and salt."""
        entry = self.table[address]
        return int(entry[0]) >> 2 == head >> 2 and int(entry[-1]) == salt

    def write_entry(self, address: int, head: int, salt: int, successors: Sequence[int]) -> None:
        """Write one entry; it is steadier than before if its first successor stays the same."""
        old_head, first_successor = self.table[address, :2].tolist()
        stays = self.is_written(address, head, salt) and first_successor == successors[0]
        steadiness = min(MAX_STEADINESS, (old_head & 3) + 1) if stays else 0
        entry = [head | steadiness, *successors, salt]
        self.table[address] = torch.tensor(entry, dtype=torch.int32)


def slots_in(mib: int, k: int) -> int:
    """The largest power of two of entries of k successors that fit a number of MiB."""
    return 1 << ((mib * MIB // (4 * (2 + k))).bit_length() - 1)
