"""Ouroboros as a proposer: a draft model that drafts by phrases, and what is learnt on the way.

arXiv 2402.13720, section 3. This ties together `phrase_pool`, `lookahead` and `harvest`, whose
names of dimensions are used. The draft model is the runner's, which knows its KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_recycle.core.draft_shape import DraftShape
from vllm_recycle.core.harvest import harvest
from vllm_recycle.core.lookahead import advance_window
from vllm_recycle.core.phrase_pool import PhrasePool, insert_phrases, newest_phrases
from vllm_recycle.core.trunk import DraftModel
from vllm_recycle.core.verification import NO_TOKEN, walk

WINDOW_SEED = 0


def make_pool(
    shape: DraftShape,
    vocab_size: int,
    *,
    max_num_reqs: int,
    is_shared: bool,
    device: torch.device | str,
) -> PhrasePool:
    """The pool that drafts of a shape need: one for all requests, or one for each, side by side."""
    return PhrasePool(
        vocab_size if is_shared else vocab_size * max_num_reqs,
        per_token=max(shape.guesses, shape.branches, 1),
        length=shape.length,
        device=device,
    )


class OuroborosProposer:
    """Drafts by a draft model and the phrase pool, and learns phrases from what the target says.

    Args:
        shape: sizes of a draft.
        vocab_size: number of token ids.
        max_num_reqs: every `req_state_idx` is below this.
        max_forwards: draft forwards a round; None for as many as gamma tokens take. A trunk that
            is shorter then is filled up with the newest phrases.
        stops_early: whether a round ends when all trunks are whole, which waits for the device.
        harvest_trunk, harvest_branches: whether phrases come from verification (section 3.3).
        shares_pool: whether all requests share a pool that is never cleared (section 3.4); else
            each has its own, which ends with it.
        device: where all of this lives.

    Attributes:
        tree: what the target verifies.
        lookahead: the rows of a draft forward.
        num_rounds: drafts made so far, counted once for each request.
        num_forwards: draft forwards so far, counted once for each request that took part.

    """

    def __init__(
        self,
        shape: DraftShape,
        *,
        vocab_size: int,
        max_num_reqs: int,
        max_forwards: int | None = None,
        stops_early: bool = True,
        harvest_trunk: bool = True,
        harvest_branches: bool = True,
        shares_pool: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = shape
        self.tree = shape.tree().to(device)
        self.lookahead = shape.lookahead().to(device)
        self.max_forwards = min(shape.gamma, max_forwards or shape.gamma)
        self.stops_early = stops_early
        self.harvest_trunk, self.harvest_branches = harvest_trunk, harvest_branches
        # Places of the pool's table between the same token of two requests.
        self.pool_stride = 0 if shares_pool else vocab_size
        self.pool = make_pool(
            shape, vocab_size, max_num_reqs=max_num_reqs, is_shared=shares_pool, device=device
        )
        self.windows = torch.zeros(
            max_num_reqs, shape.levels, shape.window, dtype=torch.int64, device=device
        )
        self.num_filled = torch.ones(max_num_reqs, dtype=torch.int64, device=device)
        generator = torch.Generator().manual_seed(WINDOW_SEED)
        self.window_draw = torch.rand(shape.window, generator=generator).to(device)
        self.num_rounds = self.num_forwards = 0

    def begin(self, expanded_idx_mapping: torch.Tensor, prompt_token_ids: torch.Tensor) -> None:
        """Level 0 of each window: tokens drawn from the prompt, as if for every prompt anew."""
        num_tokens = len(expanded_idx_mapping)
        increments = torch.ones_like(expanded_idx_mapping)
        index = torch.arange(num_tokens, device=increments.device)
        lengths = torch.zeros_like(self.num_filled).index_add_(0, expanded_idx_mapping, increments)
        first_indices = torch.zeros_like(lengths).scatter_reduce_(
            0, expanded_idx_mapping, index, "amin", include_self=False
        )
        offsets = (self.window_draw * lengths[:, None]).long().minimum(lengths[:, None] - 1)
        place = (first_indices[:, None] + offsets).clamp(min=0)
        has_prompt = lengths > 0
        self.windows[:, 0] = prompt_token_ids[place].where(has_prompt[:, None], self.windows[:, 0])
        self.num_filled.masked_fill_(has_prompt, 1)

    def release(self, req_state_indices: Sequence[int]) -> None:
        for req_state_idx in req_state_indices if self.pool_stride else ():
            self.pool.forget(req_state_idx * self.pool_stride, self.pool_stride)

    def propose(
        self,
        idx_mapping: torch.Tensor,
        last_token_ids: torch.Tensor,
        *,
        draft_model: DraftModel,
        room: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draft below the last token of each request (sections 3.1 and 3.2).

        Args:
            idx_mapping: int64 [batch].
            last_token_ids: int64 [batch].
            draft_model: what drafts.
            room: int64 [batch], tokens of a trunk that the draft model has room for; below 0 where
                it has none for the last token. None where there is always enough.

        """
        gamma, length = self.shape.gamma, self.shape.length
        # As wide as the last forward may make it.
        trunk = last_token_ids.new_full((len(idx_mapping), gamma + length + 1), NO_TOKEN)
        count = torch.zeros_like(idx_mapping)
        room = torch.full_like(count, gamma) if room is None else room
        active = torch.arange(len(idx_mapping), device=idx_mapping.device)
        last_ids, new_token_ids = last_token_ids, last_token_ids[:, None]
        for _ in range(self.max_forwards):
            is_drafting = (count[active] < gamma) & (count[active] <= room[active])
            if self.stops_early:
                active, last_ids = active[is_drafting], last_ids[is_drafting]
                new_token_ids, is_drafting = new_token_ids[is_drafting], is_drafting[is_drafting]
                if not len(active):
                    break
            new_token_ids, num_new = self._draft(
                draft_model, idx_mapping[active], new_token_ids, last_ids, is_drafting
            )
            # What is beyond gamma is of no account.
            start = count[active].clamp(max=gamma)[:, None]
            place = start + torch.arange(length + 1, device=start.device)
            trunk[active[:, None], place] = new_token_ids
            newest_ids = new_token_ids.gather(1, (num_new[:, None] - 1).clamp(min=0)).flatten()
            last_ids = newest_ids.where(is_drafting, last_ids)
            count[active] += num_new
            self.num_forwards += len(active)
        self.num_rounds += len(idx_mapping)
        trunk = trunk[:, :gamma]
        if self.max_forwards < gamma:
            trunk = self._filled_up(idx_mapping, trunk, count)
        return torch.cat((trunk, self._branches(idx_mapping, trunk)), dim=1)

    def observe(
        self,
        expanded_idx_mapping: torch.Tensor,
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
    ) -> None:
        # Phrases are what the target finds most probable, however its tokens are sampled.
        if len(token_ids) == len(cu_num_logits) - 1:  # no drafts
            return
        sampled = logits.max(dim=1).indices
        trunk_phrases, branch_phrases = harvest(token_ids, sampled, cu_num_logits, shape=self.shape)
        idx_mapping = expanded_idx_mapping[cu_num_logits[:-1]]
        if self.harvest_trunk:
            self._insert(idx_mapping, *trunk_phrases)
        if self.harvest_branches:
            self._insert(idx_mapping, *branch_phrases)

    def _draft(
        self,
        draft_model: DraftModel,
        idx_mapping: torch.Tensor,
        new_token_ids: torch.Tensor,
        last_token_ids: torch.Tensor,
        is_drafting: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft forward; `is_drafting`, bool [batch], says who has not drafted enough.

        Returns:
            What it drafted, int64 [batch, length + 1], padded with -1, and how many tokens these
            are, int64 [batch].

        """
        batch, shape, lookahead = len(idx_mapping), self.shape, self.lookahead
        num_filled, window = self.num_filled[idx_mapping], self.windows[idx_mapping]
        level = torch.arange(shape.levels, device=idx_mapping.device)
        is_filled = (level < num_filled[:, None])[:, :, None]
        guesses = self._newest(idx_mapping, last_token_ids, shape.guesses).flatten(1)
        window_token_ids = window.where(is_filled, NO_TOKEN).flatten(1)
        outputs = draft_model.forward(
            idx_mapping, new_token_ids, torch.cat((window_token_ids, guesses), dim=1)
        )
        if shape.window:
            window_outputs = outputs[:, 1 : 1 + window_token_ids.shape[1]].reshape(window.shape)
            new_window, new_num_filled, owners, phrases = advance_window(
                window, num_filled, window_outputs, last_token_ids
            )
            self.windows[idx_mapping] = new_window.where(is_drafting[:, None, None], window)
            self.num_filled[idx_mapping] = new_num_filled.where(is_drafting, num_filled)
            self._insert(idx_mapping, owners.where(is_drafting[:, None], NO_TOKEN), phrases)
        # What follows is the longest guess that the draft agrees with, and the draft's next token.
        rows = lookahead.num_nodes + 1
        starts = torch.arange(0, batch * rows + 1, rows, device=idx_mapping.device)
        drafts = torch.cat((torch.full_like(window_token_ids, NO_TOKEN), guesses), dim=1)
        result = walk(outputs.flatten(), drafts, starts, trees=lookahead.of_batch(batch))
        tokens = torch.nn.functional.pad(result.token_ids, (0, shape.length), value=NO_TOKEN)
        draft_token_ids = tokens[:, : shape.length + 1].where(is_drafting[:, None], NO_TOKEN)
        return draft_token_ids, result.lengths.where(is_drafting, 0).long()

    def _filled_up(
        self, idx_mapping: torch.Tensor, trunk: torch.Tensor, count: torch.Tensor
    ) -> torch.Tensor:
        """Trunks that have few tokens, `count` of each, with the newest phrases behind them."""
        gamma, length = self.shape.gamma, self.shape.length
        place = torch.arange(length, device=idx_mapping.device)
        trunk = torch.nn.functional.pad(trunk, (0, length))
        count = count.clamp(max=gamma)
        for _ in range(-(-(gamma - self.max_forwards) // length)):
            last_token_ids = trunk.gather(1, (count[:, None] - 1).clamp(min=0)).flatten()
            phrase = self._newest(idx_mapping, last_token_ids, 1)[:, 0]
            takes_phrase = (count > 0) & (count < gamma) & (phrase[:, 0] >= 0)
            places = count[:, None] + place
            trunk.scatter_(1, places, phrase.where(takes_phrase[:, None], trunk.gather(1, places)))
            count = (count + length).where(takes_phrase, count).clamp(max=gamma)
        return trunk[:, :gamma]

    def _branches(self, idx_mapping: torch.Tensor, trunk: torch.Tensor) -> torch.Tensor:
        """int64 [batch, n], phrases below the end of each trunk (section 3.2)."""
        return self._newest(idx_mapping, trunk[:, -1], self.shape.branches).flatten(1)

    def _newest(
        self, idx_mapping: torch.Tensor, token_ids: torch.Tensor, count: int
    ) -> torch.Tensor:
        owners = self._owners(idx_mapping, token_ids)
        return newest_phrases(self.pool.table, owners, count)

    def _insert(
        self,
        idx_mapping: torch.Tensor,
        owners: torch.Tensor,
        phrases: torch.Tensor,
        replaced: torch.Tensor | None = None,
    ) -> None:
        """Insert the phrases of a batch, int64 [batch, n, length], behind their owners."""
        owners = self._owners(idx_mapping[:, None], owners).flatten()
        replaced = None if replaced is None else replaced.flatten(0, 1)
        insert_phrases(self.pool.table, owners, phrases.flatten(0, 1), replaced=replaced)

    def _owners(self, idx_mapping: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Where the pool has the phrases of these tokens."""
        if not self.pool_stride:
            return token_ids
        return (idx_mapping * self.pool_stride + token_ids).where(token_ids >= 0, NO_TOKEN)
