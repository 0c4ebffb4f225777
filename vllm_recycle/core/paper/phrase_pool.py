"""The phrase pool: for each token the phrases that followed it, the newest last.

Ouroboros (arXiv 2402.13720), sections 3.1, 3.3 and 3.4. One tensor holds all phrases: a token
has `per_token` places, filled from the last one backwards; a place without a phrase holds -1. A
phrase seen again becomes the newest, and the oldest goes when a token's places are full. Behind the
places of the tokens are some for what belongs to none: what they hold is of no account.

Names of dimensions, beside those of `core.tree`:

    owners     tokens that have phrases: all, or all of each request
    per_token  phrases kept for a token, max(G, K)      length  tokens of a phrase, the paper's beta
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_recycle.core.saved_state import SavedState, check_token_ids
from vllm_recycle.core.verification import NO_TOKEN


class PhrasePool(SavedState):
    """All phrases of an engine, in the memory of a device.

    Args:
        num_owners: whose phrases it keeps: all tokens, or where each request has a pool of its own
            all tokens of each request.
        per_token, length: see above.
        device: where the table lives.

    """

    def __init__(
        self, num_owners: int, *, per_token: int, length: int, device: torch.device | str = "cpu"
    ) -> None:
        shape = (num_owners + 1, per_token, length)
        self.table = torch.empty(shape, dtype=torch.int32, device=device)
        self.clear()

    @property
    def phrases(self) -> torch.Tensor:
        """int32 [owners, per_token, length], the newest of a token last (a view)."""
        return self.table[:-1]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"phrase_pool": self.table}

    @property
    def places(self) -> dict[str, torch.Tensor]:
        return {"phrase_pool": self.phrases}

    @property
    def num_phrases(self) -> int:
        """How many phrases the pool holds."""
        return int((self.phrases[:, :, 0] >= 0).sum())

    @property
    def share_written(self) -> float:
        return self.num_phrases / self.phrases[:, :, 0].numel()

    def clear(self) -> None:
        self.table.fill_(NO_TOKEN)

    def forget(self, first_owner: int, count: int) -> None:
        """Forget the phrases of `count` tokens from `first_owner` on."""
        self.table[first_owner : first_owner + count] = NO_TOKEN

    def validate(self, tensors: Mapping[str, torch.Tensor]) -> None:
        phrases = tensors["phrase_pool"]
        check_token_ids(phrases, len(self.phrases))
        has_token = phrases >= 0
        is_phrase = has_token[:, :, :1]
        if not (has_token == is_phrase).all() or (is_phrase[:, 1:] < is_phrase[:, :-1]).any():
            raise ValueError("it has phrases with gaps")

    def is_better(self, peer_lines: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
        """The phrases of tokens that have none here."""
        return lines[:, -1:, :1] < 0

    @property
    def facts(self) -> dict[str, object]:
        num_owners, per_token, length = self.phrases.shape
        return {"vocab_size": num_owners, "per_token": per_token, "length": length}

    def newest(self, token_ids: torch.Tensor, count: int) -> torch.Tensor:
        """The newest phrases of each token, the newest first.

        Of int64 [...], -1 for none, this is int64 [..., count, length], -1 where a token has no
        more; `count` is at most `per_token`.
        """
        phrases = self.table[token_ids, self.table.shape[1] - count :].flip(-2).to(torch.int64)
        return phrases.masked_fill((token_ids < 0)[..., None, None], NO_TOKEN)

    def insert(
        self, token_ids: torch.Tensor, phrases: torch.Tensor, replaced: torch.Tensor | None = None
    ) -> None:
        """Insert phrases as if one after the other; the last one given of a token is the newest.

        Nothing waits for a device. Time and memory go by the square of the number of phrases.

        Args:
            token_ids: int64 [n], the token that each phrase follows, -1 for one to ignore.
            phrases: integer [n, length]; one with a negative token is ignored.
            replaced: integer [n, length], phrases of the same tokens, each to be forgotten before
                all of these are inserted, if the pool has it and its phrase is not to be ignored.

        """
        table, spare_owner, per_token = self.table, len(self.table) - 1, self.table.shape[1]
        phrases = phrases.to(table.dtype)
        is_phrase = (token_ids >= 0) & (phrases >= 0).all(dim=1)
        owners = token_ids.where(is_phrase, spare_owner)
        # Each phrase with each: those of the same token, and those of them that come later.
        is_of_owner = owners[:, None] == owners
        is_later = is_of_owner.triu(1)
        is_equal = is_later.clone()
        for column in phrases.unbind(dim=1):
            is_equal &= column[:, None] == column
        is_kept = ~is_equal.any(dim=1)  # the last of equal ones
        # What the token of each has already goes where it comes again, or is replaced.
        pool_phrases = table[owners]
        is_gone = (pool_phrases == phrases[:, None]).all(dim=2)
        if replaced is not None:
            is_gone |= (pool_phrases == replaced[:, None]).all(dim=2)
        is_gone = is_of_owner.float() @ is_gone.float() > 0
        stays = (pool_phrases[:, :, 0] >= 0) & ~is_gone
        num_newer = (is_later & is_kept).sum(dim=1, keepdim=True)
        num_newer_stay = stays.flip(1).cumsum(dim=1).flip(1) - 1
        num_newer_of_pool = (is_of_owner & is_kept).sum(dim=1, keepdim=True) + num_newer_stay
        table.index_fill_(0, owners, NO_TOKEN)
        # Phrases of a token all say the same of what it has already.
        for is_there, num_newer_ones, values in (
            (stays, num_newer_of_pool, pool_phrases),
            (is_kept[:, None], num_newer, phrases[:, None]),
        ):
            place = per_token - 1 - num_newer_ones
            rows = owners[:, None].where(is_there & (place >= 0), spare_owner)
            table[rows, place.clamp(min=0)] = values
