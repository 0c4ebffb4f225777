"""Watches what drafters of Model Runner V2 learn from; for tests alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


def watch_tails(drafter: Any, seen: Counter) -> None:
    """Count the texts that learning and growing are told of, and those that end elsewhere."""
    accept, propose, read_tails = drafter.accept, drafter.propose, drafter._tails
    tails: list[torch.Tensor] = []
    told: list[tuple[torch.Tensor, torch.Tensor]] = []  # where texts end, and where they should

    def seen_tails(*args: Any) -> torch.Tensor:
        tails.append(read_tails(*args))
        return tails[-1]

    def compared_accept(input_batch: Any, row_token_ids: torch.Tensor, *args: Any) -> None:
        output, path = args
        for end, expected in told:
            seen["texts"] += len(end)
            seen["texts that end elsewhere"] += int((end != expected).sum())
        told.clear()
        seen["steps without trees"] += path is None
        accept(input_batch, row_token_ids, *args)
        # A prompt that goes on ends elsewhere.
        is_sampled = output.num_sampled > 0
        roots = row_token_ids[input_batch.cu_num_logits[:-1]]
        told.append((tails[-1][is_sampled, 0], roots[is_sampled]))
        drafter.is_sampled = bool(is_sampled.all())

    def compared_propose(idx_mapping: torch.Tensor, last_sampled: torch.Tensor) -> torch.Tensor:
        drafts = propose(idx_mapping, last_sampled)
        if drafter.is_sampled:  # else a prompt goes on behind what is told of it
            told.append((tails[-1][:, 0], last_sampled[idx_mapping, 0]))
        return drafts

    drafter.is_sampled = False
    drafter._tails, drafter.accept, drafter.propose = seen_tails, compared_accept, compared_propose


def watch_prompts(drafter: Any, seen: Counter) -> None:
    """Count the rows in the middle of prompts, and those of them that are learnt from."""
    observe, learn = drafter.observe, drafter.proposer.observe
    learnt: list[torch.Tensor] = []

    def seen_observe(input_batch: Any, *args: Any) -> None:
        observe(input_batch, *args)
        ends = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        goes_on = torch.from_numpy(ends < input_batch.prefill_len_np)
        goes_on = goes_on.repeat_interleave(input_batch.cu_num_logits.diff())
        is_learnt = learnt.pop() >= 0
        seen["rows within prompts"] += int(goes_on.sum())
        seen["rows within prompts learnt from"] += int((goes_on & is_learnt).sum())
        seen["rows learnt from"] += int(is_learnt.sum())

    def seen_learn(idx_mapping: torch.Tensor, token_ids: torch.Tensor, *args: Any) -> None:
        learnt.append(token_ids)
        learn(idx_mapping, token_ids, *args)

    drafter.observe, drafter.proposer.observe = seen_observe, seen_learn
