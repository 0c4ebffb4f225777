"""Whose a sequence is, and the salts of owners, by which the adjacency matrix tells them apart."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

# Of a salt: that it is an owner's, and that its sequences neither read nor write what is shared.
OWNER_SALT, PRIVATE_SALT = 1 << 29, 1 << 30
MAX_SALT = OWNER_SALT - 1
MAX_OWNERS = 1 << 16  # that are known; then the one that was not seen for longest is forgotten


class Owner(NamedTuple):
    """Whose a sequence is.

    Attributes:
        name: that it was given, or else the digest of its cache salt.
        cache_salt: a digest; with one its entries are private.
        is_session: whether the name is that of a request whose input is streamed, which comes as a
            new one with each part of it.

    """

    name: str | int
    cache_salt: str | None = None
    is_session: bool = False


class Owners:
    """The salts of owners. One that was forgotten comes back with another salt."""

    def __init__(self) -> None:
        self._num_salts = 0
        # The owner that was seen last is the last one. Sessions, of which there are ever new ones,
        # are to push out no other owner.
        self._salts: OrderedDict[Owner, int] = OrderedDict()
        self._session_salts: OrderedDict[Owner, int] = OrderedDict()

    def salt_of(self, owner: Owner) -> int:
        """The salt of an owner, which is then the last one to be forgotten."""
        salts = self._session_salts if owner.is_session else self._salts
        if owner not in salts:
            salts[owner] = self.new_salt(is_private=owner.cache_salt is not None)
        salts.move_to_end(owner)
        if len(salts) > MAX_OWNERS:
            salts.popitem(last=False)
        return salts[owner]

    def new_salt(self, *, is_private: bool) -> int:
        """One that no owner has."""
        self._num_salts = self._num_salts % MAX_SALT + 1
        return self._num_salts | OWNER_SALT | PRIVATE_SALT * is_private

    def forget(self, names: Collection[str | int]) -> list[int]:
        """Forget the owners of some names, and return the salts that they had."""
        return [self._salts.pop(owner) for owner in [*self._salts] if owner.name in names]
