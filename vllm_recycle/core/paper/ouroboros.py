"""Ouroboros as a proposer: a draft model that drafts by phrases, and what is learnt on the way.

arXiv 2402.13720, section 3. This ties together `draft_shape`, `phrase_pool` and `harvest`, whose
names of dimensions are used. The draft model is the runner's, which knows its KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_recycle.core.paper.draft_shape import DraftShape
from vllm_recycle.core.paper.harvest import Phrases, harvest
from vllm_recycle.core.trunk import DraftModel
from vllm_recycle.core.verification import NO_TOKEN, walk

WINDOW_SEED = 0


class OuroborosProposer:
    """Drafts by a draft model and the phrase pool, and learns phrases from what the target says.

    Args:
        shape: of a draft.
        vocab_size: number of token ids.
        max_num_reqs: every `req_state_idx` is below this.
        shares_pool: whether all requests share a pool that is never cleared (section 3.4); else
            each has its own, which ends with it.
        device: where all of this lives.

    Attributes:
        tree: what the target verifies.
        lookahead: the rows of a draft forward.
        max_forwards: draft forwards a round.
        num_forwards: draft forwards so far, counted once for each request that took part.

    """

    def __init__(
        self,
        shape: DraftShape,
        *,
        vocab_size: int,
        max_num_reqs: int,
        shares_pool: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = shape
        self.tree = shape.tree().to(device)
        self.lookahead = shape.lookahead().to(device)
        self.max_forwards = min(shape.gamma, shape.max_forwards or shape.gamma)
        # Places of the pool's table between the same token of two requests.
        self.pool_stride = 0 if shares_pool else vocab_size
        self.pool = shape.make_pool(vocab_size * (1 if shares_pool else max_num_reqs), device)
        self.windows = torch.zeros(
            max_num_reqs, shape.levels, shape.window, dtype=torch.int64, device=device
        )
        self.num_filled = torch.ones(max_num_reqs, dtype=torch.int64, device=device)
        generator = torch.Generator().manual_seed(WINDOW_SEED)
        self.window_draw = torch.rand(shape.window, generator=generator).to(device)
        self.num_forwards = 0

    def begin(self, req_state_idx: int, token_ids: torch.Tensor) -> None:
        """Level 0 of a window: tokens drawn from a prompt, integer [length]."""
        length = len(token_ids)
        place = (self.window_draw * length).long().clamp(max=length - 1)
        self.windows[req_state_idx, 0] = token_ids[place].long()
        self.num_filled[req_state_idx].fill_(1)

    def release(self, req_state_indices: Sequence[int]) -> None:
        for req_state_idx in req_state_indices if self.pool_stride else ():
            self.pool.forget(req_state_idx * self.pool_stride, self.pool_stride)

    def propose(
        self,
        idx_mapping: torch.Tensor,
        last_token_ids: torch.Tensor,
        *,
        draft_model: DraftModel,
        max_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draft below the last token of each request (sections 3.1 and 3.2).

        Args:
            idx_mapping: int64 [batch].
            last_token_ids: int64 [batch].
            draft_model: what drafts.
            max_lengths: int64 [batch], the most tokens of a trunk that the draft model has room
                for; 0 where nothing is drafted. None where there is always enough; then no round
                ends before its last forward, since to see that waits for the device.

        """
        gamma, length = self.shape.gamma, self.shape.length
        # As wide as the last forward may make it.
        trunk = last_token_ids.new_full((len(idx_mapping), gamma + length + 1), NO_TOKEN)
        count = torch.zeros_like(idx_mapping)
        limits = torch.full_like(count, gamma) if max_lengths is None else max_lengths
        active = torch.arange(len(idx_mapping), device=idx_mapping.device)
        new_token_ids = last_token_ids[:, None]
        for _ in range(self.max_forwards):
            is_drafting = (count[active] < limits[active]) & (count[active] < gamma)
            if max_lengths is not None:
                active, new_token_ids = active[is_drafting], new_token_ids[is_drafting]
                is_drafting = is_drafting[is_drafting]
                if not len(active):
                    break
            new_token_ids = self._draft(
                draft_model, idx_mapping[active], new_token_ids, is_drafting
            )
            # What is beyond gamma is of no account.
            start = count[active].clamp(max=gamma)[:, None]
            place = start + torch.arange(length + 1, device=start.device)
            trunk[active[:, None], place] = new_token_ids
            count[active] += (new_token_ids >= 0).sum(dim=1)
            self.num_forwards += len(active)
        trunk = trunk[:, :gamma]
        if self.max_forwards < gamma:
            trunk = self._filled_up(idx_mapping, trunk, count)
        branches = self._newest(idx_mapping, trunk[:, -1], self.shape.branches)
        return torch.cat((trunk, branches.flatten(1)), dim=1)

    def observe(
        self,
        idx_mapping: torch.Tensor,
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
    ) -> None:
        # Phrases are what the target finds most probable, however its tokens are sampled.
        if len(token_ids) == len(cu_num_logits) - 1:  # no drafts
            return
        sampled = logits.max(dim=1).indices
        trunk_phrases, branch_phrases = harvest(self.shape, token_ids, sampled, cu_num_logits)
        if self.shape.harvest_trunk:
            self._insert(idx_mapping, trunk_phrases)
        if self.shape.harvest_branches:
            self._insert(idx_mapping, branch_phrases)

    def _draft(
        self,
        draft_model: DraftModel,
        idx_mapping: torch.Tensor,
        new_token_ids: torch.Tensor,
        is_drafting: torch.Tensor,
    ) -> torch.Tensor:
        """One draft forward; `is_drafting`, bool [batch], says who has not drafted enough.

        Returns:
            What it drafted, int64 [batch, length + 1], padded with -1.

        """
        batch, shape, lookahead = len(idx_mapping), self.shape, self.lookahead
        newest = (new_token_ids >= 0).sum(dim=1, keepdim=True) - 1
        last_token_ids = new_token_ids.gather(1, newest.clamp(min=0)).flatten()
        level = torch.arange(shape.levels, device=idx_mapping.device)
        is_filled = (level < self.num_filled[idx_mapping][:, None])[:, :, None]
        window_token_ids = self.windows[idx_mapping].where(is_filled, NO_TOKEN).flatten(1)
        guesses = self._newest(idx_mapping, last_token_ids, shape.guesses).flatten(1)
        row_token_ids = torch.cat((window_token_ids, guesses), dim=1)
        outputs = draft_model.choose(idx_mapping, new_token_ids, row_token_ids, 1)[0][:, :, 0]
        if shape.window:
            window_outputs = outputs[:, 1 : 1 + window_token_ids.shape[1]]
            self._advance_windows(idx_mapping, window_outputs, last_token_ids, is_drafting)
        # What follows is the longest guess that the draft agrees with, and the draft's next token.
        rows = lookahead.num_nodes + 1
        starts = torch.arange(0, batch * rows + 1, rows, device=idx_mapping.device)
        drafts = torch.cat((torch.full_like(window_token_ids, NO_TOKEN), guesses), dim=1)
        result = walk(outputs.flatten(), drafts, starts, trees=lookahead.of_batch(batch))
        tokens = torch.nn.functional.pad(result.token_ids, (0, shape.length), value=NO_TOKEN)
        return tokens[:, : shape.length + 1].where(is_drafting[:, None], NO_TOKEN)

    def _advance_windows(
        self,
        idx_mapping: torch.Tensor,
        outputs: torch.Tensor,
        last_token_ids: torch.Tensor,
        is_drafting: torch.Tensor,
    ) -> None:
        """Take in the draft's outputs at the rows of windows, where something is drafted.

        While levels are missing, the outputs of the last one there is become the next one. With all
        of them, each column and its output are a phrase, which follows the token before the column.
        Then every level moves up, and the outputs become the last one.

        Args:
            idx_mapping, is_drafting: as for `_draft`.
            outputs: int64 [batch, levels * window], the draft's most probable token at each row.
            last_token_ids: int64 [batch], the token before each window.

        """
        window, num_filled = self.windows[idx_mapping], self.num_filled[idx_mapping]
        levels = self.shape.levels
        is_complete = num_filled == levels
        last_level = (num_filled - 1)[:, None, None].expand(-1, 1, self.shape.window)
        new_level = outputs.reshape(window.shape).gather(1, last_level)
        owners = torch.cat((last_token_ids[:, None], window[:, 0, :-1]), dim=1)
        owners = owners.where((is_complete & is_drafting)[:, None], NO_TOKEN)
        phrases = torch.cat((window, new_level), dim=1).transpose(1, 2)
        self._insert(idx_mapping, Phrases(owners, phrases))
        moved_window = torch.cat((window[:, 1:], new_level), dim=1)
        filled_window = window.scatter(1, (last_level + 1).clamp(max=levels - 1), new_level)
        new_window = moved_window.where(is_complete[:, None, None], filled_window)
        self.windows[idx_mapping] = new_window.where(is_drafting[:, None, None], window)
        new_num_filled = (num_filled + 1).clamp(max=levels)
        self.num_filled[idx_mapping] = new_num_filled.where(is_drafting, num_filled)

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

    def _newest(
        self, idx_mapping: torch.Tensor, token_ids: torch.Tensor, count: int
    ) -> torch.Tensor:
        return self.pool.newest(self._owners(idx_mapping, token_ids), count)

    def _insert(self, idx_mapping: torch.Tensor, phrases: Phrases) -> None:
        """Insert the phrases of a batch behind their owners."""
        owners = self._owners(idx_mapping[:, None], phrases.owners).flatten()
        replaced = None if phrases.replaced is None else phrases.replaced.flatten(0, 1)
        self.pool.insert(owners, phrases.phrases.flatten(0, 1), replaced)

    def _owners(self, idx_mapping: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Where the pool has the phrases of these tokens."""
        if not self.pool_stride:
            return token_ids
        return (idx_mapping * self.pool_stride + token_ids).where(token_ids >= 0, NO_TOKEN)
