"""Watches what Token Recycling on Model Runner V2 learns from; for tests alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from vllm_recycle.integration.cuda import token_recycling


def watch_learning(drafter: Any, seen: Counter) -> None:
    """Count the texts that end elsewhere than they should, and the rows that are learnt from.

    A text ends with the root of the step where it is learnt from, and with the newest token where
    drafts are made.
    """
    accept, propose, learn = drafter.accept, drafter.propose, token_recycling.learn
    told: list[tuple[torch.Tensor, torch.Tensor]] = []  # where texts end, and where they should
    learns: list[torch.Tensor] = []

    def ends(idx_mapping: torch.Tensor) -> torch.Tensor:
        token_ids, lengths = drafter.texts
        return token_ids[idx_mapping, lengths[idx_mapping].long() - 1]

    def seen_learn(*args: Any, **given: Any) -> None:
        learns.append(given["learns"])
        learn(*args, **given)

    def compared_accept(input_batch: Any, row_token_ids: torch.Tensor, *args: Any) -> None:
        output, path = args
        for end, expected in told:
            seen["texts"] += len(end)
            seen["texts that end elsewhere"] += int((end != expected).sum())
        told.clear()
        seen["steps without trees"] += path is None
        end = ends(input_batch.idx_mapping)
        accept(input_batch, row_token_ids, *args)
        # A prompt that goes on ends elsewhere.
        is_sampled = output.num_sampled > 0
        roots = row_token_ids[input_batch.cu_num_logits[:-1]]
        told.append((end[is_sampled], roots[is_sampled]))
        drafter.is_sampled = bool(is_sampled.all())
        counts = input_batch.cu_num_logits.diff()
        last = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        goes_on = torch.from_numpy(last < input_batch.prefill_len_np).repeat_interleave(counts)
        is_learnt = (learns.pop() != 0).repeat_interleave(counts) & (row_token_ids >= 0)
        seen["rows within prompts"] += int(goes_on.sum())
        seen["rows within prompts learnt from"] += int((goes_on & is_learnt).sum())
        seen["rows learnt from"] += int(is_learnt.sum())

    def compared_propose(idx_mapping: torch.Tensor) -> torch.Tensor:
        if drafter.is_sampled:  # else a prompt goes on behind what is told of it
            newest = drafter.req_states.last_sampled_tokens[idx_mapping, 0]
            told.append((ends(idx_mapping), newest))
        return propose(idx_mapping)

    drafter.is_sampled = False
    drafter.accept, drafter.propose = compared_accept, compared_propose
    token_recycling.learn = seen_learn  # type: ignore[assignment]
