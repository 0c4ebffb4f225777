"""Context rows: the target's last top-k after each token, and after each of the last few tokens.

The row of one token is the adjacency matrix of Token Recycling (arXiv 2408.08696, section 3.1). A
row of a longer context says what followed the last n tokens. All rows are in one table:

    0 .. vocab - 1              what all sequences share of contexts of one token, by the token
    vocab .. vocab + slots - 1  everything else, by a hash of the context

A row is `[head, successor 0 .. successor k - 1, salt]`, int32, best first, padded with -1. Its head
is `tag << 3 | own << 2 | steadiness`, -1 where the row was never written. The tag tells contexts of
one place apart (the token itself, or 28 bits of the hash that the place does not use), so that a
row of another context is passed over; where both agree by chance a draft is wrong, which costs a
row and never an output. What a sequence wrote for itself (`own`) is hashed with its salt, a number
that no other has, and carries it, so that no other sequence reads it; 0 is the salt of what is
shared. So own rows need no table for each sequence, and are overwritten in time when it has ended.
Under `isolated` each running sequence has a part of the slots for itself, since what another one
overwrites would be seen in the drafts: its salt, modulo the number of parts, says which.

Steadiness counts up to 3 how often in a row an update left the most probable successor as it was.

Sequences go back from the newest token: `tails`, int64 [batch, reach], where reach is the longest
context, has the last token of each text first, and -1 behind the first one of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm_recycle.core.template_matrix import SCOPES, Scope

MAX_STEADINESS = 3
MAX_CONTEXT = 8
MIB = 1 << 20
NEVER_WRITTEN = -1
MAX_SALT = 2**31 - 1
# Multipliers of the hash, odd: 2^64 divided by the golden ratio, and by other irrationals.
_MIX, _FINISH = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_64_BITS = (1 << 64) - 1
_TAG_SHIFT = 36  # the uppermost 28 bits; places are of the lower ones


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Where rows are, and who reads and writes them.

    Attributes:
        vocab_size: number of token ids.
        k: successors of a row.
        contexts: lengths of contexts, ascending from 1.
        slots: rows that are found by a hash, a power of two.
        has_own: whether sequences write and read rows of their own.
        reads_shared: whether a sequence reads what others wrote.
        writes_shared: whether it writes for others.
        parts: of the slots, a power of two, each for one running sequence; 1 where all share them.

    """

    vocab_size: int
    k: int
    contexts: tuple[int, ...]
    slots: int
    has_own: bool
    reads_shared: bool
    writes_shared: bool
    parts: int = 1

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return 2 + self.k

    @property
    def reach(self) -> int:
        return self.contexts[-1]

    def addresses(self, context: Sequence[int], salt: int) -> Iterator[tuple[int, int, int, int]]:
        """Where the rows of a context are, for each of `contexts`, shortest first.

        Args:
            context: tokens, the newest first; ends at `reach`, or at what is no token.
            salt: of the sequence, above 0.

        Yields:
            Index of the length, 1 for its own row and 0 for the shared one, address, and the head
            of the row but for its steadiness.

        """
        hashed, seen = 0, 0
        slots = self.slots // self.parts
        first = self.vocab_size + salt % self.parts * slots
        for index, length in enumerate(self.contexts):
            for token in context[seen:length]:
                if not 0 <= token < self.vocab_size:
                    return
                hashed = (hashed ^ (token + 1)) * _MIX & _64_BITS
                hashed ^= hashed >> 32
            if len(context) < length:
                return
            seen = length
            for own in (0, 1):
                if length == 1 and not own:
                    yield index, 0, context[0], context[0] << 3
                    continue
                # Nothing of others is in a part, and where its rows are says nothing of others.
                salted = salt if own and self.parts == 1 else 0
                key = (hashed + salted * _FINISH + length) * _FINISH & _64_BITS
                key = (key ^ key >> 29) * _MIX & _64_BITS
                head = (key >> _TAG_SHIFT) << 3 | own << 2
                yield index, own, first + (key & (slots - 1)), head


class AdjacencyMatrix:
    """The table, and the salts of the running sequences.

    Args:
        vocab_size: number of token ids, below 2^28.
        k: successors kept for each context.
        contexts: lengths of contexts, ascending from 1.
        slots: rows that are found by a hash, a power of two below 2^36; under `isolated` at least
            one for each sequence.
        scope: as for `TemplateMatrix`: who reads and writes what.
        hot_start: whether a sequence reads the shared rows.
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
        hot_start: bool = True,
        max_num_reqs: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        if scope not in SCOPES:
            raise ValueError(f"scope: got {scope!r}, expected one of {SCOPES}")
        if scope == "shared" and not hot_start:
            raise ValueError("hot_start: got false with scope 'shared', which has no other rows")
        if slots < 1 or slots & (slots - 1):
            raise ValueError(f"slots: got {slots}, expected a power of two")
        self.scope = scope
        parts = 1 << (max_num_reqs - 1).bit_length() if scope == "isolated" else 1
        self.layout = MatrixLayout(
            vocab_size=vocab_size,
            k=k,
            contexts=check_contexts(contexts),
            slots=max(slots, parts),
            has_own=scope != "shared",
            reads_shared=hot_start and scope != "isolated",
            writes_shared=scope != "isolated",
            parts=parts,
        )
        rows = vocab_size + self.layout.slots
        self.table = torch.empty(rows, self.layout.width, dtype=torch.int32, device=device)
        self._num_begun = [0] * parts
        self.salts = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.clear()

    @property
    def num_bytes(self) -> int:
        return self.table.nbytes

    @property
    def num_written(self) -> int:
        """How many rows there are."""
        return int((self.table[:, 0] >= 0).sum())

    def clear(self) -> None:
        """Forget everything."""
        self.table.fill_(NEVER_WRITTEN)

    def begin(self, req_state_idx: int) -> None:
        """A sequence starts: it sees nothing that an earlier one wrote for itself."""
        parts = self.layout.parts
        part = req_state_idx % parts
        self._num_begun[part] = self._num_begun[part] % (MAX_SALT // parts) + 1
        # Never 0, which is what is shared.
        self.salts[req_state_idx] = self._num_begun[part] * parts + part

    def shared_entries(self) -> torch.Tensor:
        """A copy of the table without what sequences wrote for themselves."""
        table = self.table.clone()
        heads = table[:, 0]
        table[(heads >= 0) & (heads & 4 != 0)] = NEVER_WRITTEN
        return table


def check_contexts(contexts: Sequence[int]) -> tuple[int, ...]:
    """The lengths of contexts, checked.

    Raises:
        ValueError: they are not ascending from 1 to at most `MAX_CONTEXT`.

    """
    lengths = tuple(contexts)
    if (
        not all(isinstance(length, int) and not isinstance(length, bool) for length in lengths)
        or lengths[:1] != (1,)
        or lengths[-1] > MAX_CONTEXT
        or list(lengths) != sorted(set(lengths))
    ):
        raise ValueError(
            f"contexts: got {list(contexts)!r}, expected lengths ascending from 1 to at most "
            f"{MAX_CONTEXT}, such as [1, 2, 3, 4]"
        )
    return lengths


def slots_in(mib: int, k: int) -> int:
    """The largest power of two of rows of k successors that fit a number of MiB."""
    return 1 << ((mib * MIB // (4 * (2 + k))).bit_length() - 1)


def find_entry(
    table: torch.Tensor, context: Sequence[int], salt: int, layout: MatrixLayout
) -> tuple[int, int, int] | None:
    """The row to draft from: that of the longest context that is known, an own one first.

    Returns:
        Its address, the index of its length among `contexts`, and 1 if it is an own one; None
        where nothing is known.

    """
    found = None
    for index, own, address, head in layout.addresses(context, salt):
        if not (layout.has_own if own else layout.reads_shared):
            continue
        if is_written(table, address, head, salt if own else 0):
            found = (address, index, own)  # the shared one of a length comes before the own one
    return found


def write_entries(
    table: torch.Tensor,
    context: Sequence[int],
    salt: int,
    successors: Sequence[int],
    layout: MatrixLayout,
    *,
    own: bool,
    shared: bool,
) -> None:
    """Write what follows a context into the rows of all its lengths.

    Args:
        table: int32 [addresses, 2 + k], written in place.
        context: tokens, the newest first.
        salt: of the sequence.
        successors: k tokens, best first, padded with -1.
        layout: of the table.
        own: whether the sequence's own rows are written.
        shared: whether those for all are.

    """
    for _, is_own, address, head in layout.addresses(context, salt):
        if own if is_own else shared:
            write_entry(table, address, head, salt if is_own else 0, successors)


def is_written(table: torch.Tensor, address: int, head: int, salt: int) -> bool:
    """Whether the row there is the one of this head and salt."""
    return int(table[address, 0]) >> 2 == head >> 2 and int(table[address, -1]) == salt


def write_entry(
    table: torch.Tensor, address: int, head: int, salt: int, successors: Sequence[int]
) -> None:
    """Write one row; it is steadier than before if the most probable successor is the same."""
    old, first = table[address, :2].tolist()
    stays = is_written(table, address, head, salt) and first == successors[0]
    steadiness = min(MAX_STEADINESS, (old & 3) + 1) if stays else 0
    table[address] = torch.tensor([head | steadiness, *successors, salt], dtype=torch.int32)
