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

    Raises:
        ValueError: `per_token` or `length` below 1.

    """

    def __init__(
        self, num_owners: int, *, per_token: int, length: int, device: torch.device | str = "cpu"
    ) -> None:
        for name, value in (("per_token", per_token), ("length", length)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected 1 or more")
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
    def num_bytes(self) -> int:
        return self.table.nbytes

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


def newest_phrases(table: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
    """The newest phrases of each token, the newest first.

    Of int32 [owners + 1, per_token, length] and int64 [...], -1 for none, this is int64
    [..., count, length], -1 where a token has no more; `count` is at most `per_token`.
    """
    phrases = table[token_ids, table.shape[1] - count :].flip(-2).to(torch.int64)
    return phrases.masked_fill((token_ids < 0)[..., None, None], NO_TOKEN)


def insert_phrases(
    table: torch.Tensor,
    token_ids: torch.Tensor,
    phrases: torch.Tensor,
    *,
    replaced: torch.Tensor | None = None,
) -> None:
    """Insert phrases as if one after the other; the last one given of a token is the newest.

    Args:
        table: int32 [owners + 1, per_token, length], changed in place; the last is nobody's.
        token_ids: int64 [n], the token that each phrase follows, -1 for one to ignore.
        phrases: integer [n, length]; one with a negative token is ignored.
        replaced: integer [n, length], phrases of the same tokens, each to be forgotten before all
            of these are inserted, if the pool has it and its phrase is not to be ignored.

    """
    spare_owner, per_token = table.shape[0] - 1, table.shape[1]
    is_phrase = (token_ids >= 0) & (phrases >= 0).all(dim=1)
    owners, order = token_ids.where(is_phrase, spare_owner).sort(stable=True)
    # Candidates, by age: what a token has already, listed with the first that comes in for it, and
    # then what comes in.
    pool_phrases, starts = table[owners], _run_starts(owners)
    if replaced is not None:
        group = starts.cumsum(0) - 1
        hits = (pool_phrases == replaced[order].to(table.dtype)[:, None]).all(dim=2).to(torch.int32)
        hits = torch.zeros_like(hits).index_add_(0, group, hits)[group]
        pool_phrases = pool_phrases.masked_fill(hits[:, :, None] > 0, NO_TOKEN)
    pool_phrases = pool_phrases.masked_fill(~starts[:, None, None], NO_TOKEN)
    candidates = torch.cat((pool_phrases.flatten(0, 1), phrases[order].to(table.dtype)))
    table[owners] = NO_TOKEN
    owners = torch.cat((owners.repeat_interleave(per_token), owners))
    owners = owners.where(candidates[:, 0] >= 0, spare_owner)
    # The youngest of equal ones of a token stays.
    index = torch.arange(len(owners), device=table.device)
    _, group = torch.cat((owners[:, None], candidates), dim=1).unique(dim=0, return_inverse=True)
    youngest_index = torch.zeros_like(index).scatter_reduce_(0, group, index, "amax")
    owners = owners.where(youngest_index[group] == index, spare_owner)
    # By token, the oldest first; places are counted from the last of each token.
    owners, order = owners.sort(stable=True)
    is_last = _run_starts(owners.flip(0)).flip(0)
    last_index = index.where(is_last, len(owners)).flip(0).cummin(0).values.flip(0)
    place = per_token - 1 - (last_index - index)
    owners = owners.where(place >= 0, spare_owner)
    table[owners, place.clamp(min=0)] = candidates[order]


def _run_starts(values: torch.Tensor) -> torch.Tensor:
    """bool [n], where a value of [n] differs from the one before it; the first always does."""
    starts = torch.ones_like(values, dtype=torch.bool)
    starts[1:] = values[1:] != values[:-1]
    return starts
