"""Ouroboros on the V1 runner: vLLM's draft model, drafting by lookahead forwards.

Its layers share the block table with the target's. A forward has, of each request, first the tokens
that the draft's KV cache does not hold yet, which are written there, and behind the last of them
the rows of lookahead decoding, a tree whose keys and values are never written. So the cache follows
the text: each step takes in what the target has computed in it, before any block of that can be
another request's prefix. Tokens that were drafted, taken in and then rejected are forgotten by
counting back.
"""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.models import supports_multimodal
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from vllm_recycle.core.acceptance import NodeAcceptance
from vllm_recycle.core.verification import NO_TOKEN, WalkResult
from vllm_recycle.integration.cpu.drafter import Ends, PricedV1Drafter, TemplateV1Drafter, Texts
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.cpu.time_steps import ROUNDS
from vllm_recycle.integration.cpu.tree_rows import prepare_trees
from vllm_recycle.integration.drafter import from_first_rank
from vllm_recycle.integration.ouroboros import (
    OuroborosDrafter,
    group_of_draft_layers,
    refuse_shared_caches,
)
from vllm_recycle.kernels.cpu import native_operations


class OuroborosV1Drafter(OuroborosDrafter, PricedV1Drafter, TemplateV1Drafter, DraftModelProposer):
    """vLLM's draft model with its loading and KV cache; and Ouroboros, which drives it.

    Of what is drafted the target verifies what is worth its rows.

    Attributes:
        acceptance: what the nodes of a draft are worth.
        drafted: int64 [max_num_reqs, nodes], the last draft of each request, whole.
        num_cached: int64 [max_num_reqs], tokens of each text whose keys and values the draft has.
        trunks: int64 [max_num_reqs, gamma], those of them that were drafted in the last round, from
            `round_starts`, int64 [max_num_reqs], on; padded with -1.
        index: int64 [max_num_reqs], place in the batch of the step.
        ends: int64 [max_num_reqs], tokens of each text that were taken in or are in the runner's.

    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        DraftModelProposer.__init__(self, vllm_config, device, runner)
        self.make_proposer(native_operations(), device, stops_early=True)
        self.read_prices()
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        tree = self.proposer.tree
        self.acceptance = NodeAcceptance(tree)
        self.drafted = torch.full((max_num_reqs, tree.num_nodes), NO_TOKEN)
        self.num_cached, self.round_starts, self.index, self.ends = np.zeros(
            (4, max_num_reqs), dtype=np.int64
        )
        self.trunks = np.full((max_num_reqs, self.proposer.shape.gamma), NO_TOKEN)

    def load_model(self, target_model: Any) -> None:
        if supports_multimodal(target_model):
            # vLLM asks it for its token of an image, which not all have; here it is text alone.
            target_model = target_model.get_language_model()
        super().load_model(target_model)
        refuse_shared_caches(self.attention_layers, self.compilation_config)

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        group_of_draft_layers(kv_cache_config, self.attention_layers)

    def initialize_attn_backend(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_attn_backend(*args, **kwargs)
        for group in self.draft_attn_groups:
            group.get_metadata_builder().trees_are_cached = False

    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """One forward; vLLM's makes one for every draft token."""
        self._run_model(num_tokens, None)

    @property
    def attention_layers(self) -> Set[str]:
        return self._draft_attn_layer_names

    def begin(self, req_state_idx: int, token_ids: torch.Tensor, num_computed_tokens: int) -> None:
        super().begin(req_state_idx, token_ids, num_computed_tokens)
        self.num_cached[req_state_idx] = num_computed_tokens
        self.trunks[req_state_idx] = NO_TOKEN
        self.drafted[req_state_idx] = NO_TOKEN

    def statistics(self) -> dict[str, float]:
        counted = {"rounds": self.proposer.num_rounds, "forwards": self.proposer.num_forwards}
        return super().statistics() | counted

    def reset(self) -> None:
        super().reset()
        self.acceptance.clear()

    def accept(
        self, idx_mapping: torch.Tensor, trees: StepLayout, walked: WalkResult, ends: Ends
    ) -> None:
        self.acceptance.count(self.drafted[idx_mapping], walked)
        self.drafted[idx_mapping] = NO_TOKEN

    def draft(self, texts: Texts, block_tables: Any) -> torch.Tensor:
        """As for all; and take in what the target has computed of every text, drafted for or not.

        The step's requests are kept for `forward`, which the proposer calls back.
        """
        idx_mapping, num_computed_tokens = texts.idx_mapping.numpy(), texts.num_computed_tokens
        batch = len(idx_mapping)
        table = block_tables[self.kv_cache_gid]
        self.block_table, self.texts = table.get_device_tensor(batch), texts
        self.index[idx_mapping], self.ends[idx_mapping] = np.arange(batch), num_computed_tokens
        slots = table.num_blocks_per_row[:batch].astype(np.int64) * table.block_size
        # The width is the context's, which vLLM may shorten to what fits the KV cache.
        room = np.minimum(slots, texts.token_ids.shape[1]) - num_computed_tokens - 1
        chosen = np.nonzero(texts.wants_draft & (room >= 0))[0]
        self._forget_rejected(idx_mapping, num_computed_tokens)
        self._catch_up(idx_mapping, len(chosen))
        self.round_starts[idx_mapping], self.trunks[idx_mapping] = num_computed_tokens + 1, NO_TOKEN
        drafts = torch.full((batch, self.proposer.tree.num_nodes), NO_TOKEN)
        if len(chosen):
            drafted = self.proposer.propose(
                texts.idx_mapping[chosen],
                texts.last_token_ids(chosen),
                draft_model=self,
                room=torch.from_numpy(room[chosen]),
            )
            self.drafted[texts.idx_mapping[chosen]] = drafted
            times, _ = self.step_times.at(batch, float(num_computed_tokens.mean()))
            counts = native_operations().choose(
                self.acceptance.worths(drafted), times, num_other_rows=batch - len(chosen)
            )
            is_behind = torch.arange(drafted.shape[1]) >= counts[:, None]
            drafts[chosen] = drafted.masked_fill(is_behind, NO_TOKEN)
        return drafts

    @torch.inference_mode()
    def judge(self, step_seconds: float) -> str:
        forwards, rows = self.proposer.max_forwards, 1 + self.proposer.lookahead.num_nodes
        seconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            self.model.compute_logits(self._run_model(rows, None))
            seconds.append(time.perf_counter() - started)
        share = from_first_rank(forwards * min(seconds) / step_seconds)
        times, _ = self.step_times.at(1, 0)
        reached = 1 + self.proposer.tree.depths.cummax(0).values
        costs = share + times[1 : len(reached) + 1]
        pays = bool((reached[: len(costs)] > costs)[1:].any())
        return (
            f"; drafting takes {share:.2f} of a step, {forwards} forwards of {rows} rows: it pays "
            f"above {float(costs[1]):.1f} tokens a step"
            + ("" if pays else ", more than any draft can give: leave the method out")
        )

    def _forget_rejected(self, idx_mapping: np.ndarray, num_computed_tokens: np.ndarray) -> None:
        """Count each cache back to where the text is no more what was drafted."""
        trunks = self.trunks[idx_mapping]
        place = self.round_starts[idx_mapping][:, None] + np.arange(trunks.shape[1])
        index = np.arange(len(idx_mapping))[:, None]
        text = self.texts.token_ids[index, place.clip(max=self.texts.token_ids.shape[1] - 1)]
        agrees = (text == trunks) & (place < num_computed_tokens[:, None])
        kept = self.round_starts[idx_mapping] + np.cumprod(agrees, axis=1).sum(axis=1)
        was_drafted = trunks[:, 0] != NO_TOKEN
        cached = np.where(was_drafted, kept, self.num_cached[idx_mapping])
        self.num_cached[idx_mapping] = np.minimum(cached, num_computed_tokens)

    def _catch_up(self, idx_mapping: np.ndarray, num_drafting: int) -> None:
        """Take in what cannot wait for the first draft forward, or does not fit into it.

        In one forward, since a request may already read what another one writes in this step.
        """
        behind = self.ends[idx_mapping] - self.num_cached[idx_mapping]
        rows = behind.sum() + num_drafting * (1 + self.proposer.lookahead.num_nodes)
        if num_drafting < len(idx_mapping) or rows > self.max_num_tokens:
            chosen = idx_mapping[behind > 0]
            if len(chosen):
                self._run(chosen, [self._unseen(req_state_idx) for req_state_idx in chosen])

    def _unseen(self, req_state_idx: int) -> np.ndarray:
        """What the draft's cache lacks of a text."""
        unseen = slice(self.num_cached[req_state_idx], self.ends[req_state_idx])
        return self.texts.token_ids[self.index[req_state_idx], unseen]

    def forward(
        self, idx_mapping: torch.Tensor, new_token_ids: torch.Tensor, row_token_ids: torch.Tensor
    ) -> torch.Tensor:
        """See `vllm_recycle.core.ouroboros.DraftModel`."""
        rows = row_token_ids.numpy()
        # Rows behind the last one that is filled would be computed for nothing.
        num_rows = np.where(rows >= 0, np.arange(1, rows.shape[1] + 1), 0).max(axis=1)
        heads = []
        for req_state_idx, new in zip(idx_mapping.tolist(), new_token_ids.numpy(), strict=True):
            new = new[new >= 0]
            heads.append(np.concatenate((self._unseen(req_state_idx), new)))
            start = self.ends[req_state_idx] - self.round_starts[req_state_idx]
            if start >= 0:
                self.trunks[req_state_idx, start : start + len(new)] = new
            self.ends[req_state_idx] += len(new)
        outputs = torch.zeros(len(rows), 1 + rows.shape[1], dtype=torch.int64)
        num_tokens = num_rows + [len(head) for head in heads]
        first = 0
        while first < len(rows):
            fitting = np.searchsorted(num_tokens[first:].cumsum(), self.max_num_tokens, "right")
            chunk = slice(first, first + max(1, int(fitting)))
            found = self._run(
                idx_mapping[chunk].numpy(),
                heads[chunk],
                [row[:count] for row, count in zip(rows[chunk], num_rows[chunk], strict=True)],
            )
            assert found is not None
            there = torch.arange(outputs.shape[1]) <= torch.from_numpy(num_rows[chunk])[:, None]
            outputs[chunk][there] = found
            first = chunk.stop
        return outputs

    def _run(
        self,
        idx_mapping: np.ndarray,
        heads: list[np.ndarray],
        rows: list[np.ndarray] | None = None,
    ) -> torch.Tensor | None:
        """One forward of the model.

        Args:
            idx_mapping: int64 [batch].
            heads: of each, the next tokens that its cache lacks, at least one.
            rows: of each, those of `lookahead` below the last of these; None to take in alone.

        Returns:
            int64 [n], the most probable next token at the last token of each head and at its rows,
            one request after the other; None without rows.

        """
        batch, looks_ahead = len(idx_mapping), rows is not None
        rows = rows or [np.empty(0, dtype=np.int64)] * batch
        num_heads, num_rows = np.array([[*map(len, heads)], [*map(len, rows)]])
        lengths = num_heads + num_rows
        starts = np.concatenate(([0], lengths.cumsum()))
        owner = np.repeat(np.arange(batch), lengths)
        offset = np.arange(starts[-1]) - starts[owner]
        first = self.num_cached[idx_mapping]
        position = first[owner] + offset
        is_head = offset < num_heads[owner]
        block_table = self.block_table[torch.from_numpy(self.index[idx_mapping])]
        block = (position // self.block_size).clip(max=block_table.shape[1] - 1)
        slots = block_table.numpy()[owner, block] * self.block_size + position % self.block_size

        n = len(owner)
        pairs = zip(heads, rows, strict=True)
        self.input_ids[:n] = torch.from_numpy(
            np.concatenate([part for pair in pairs for part in pair])
        )
        self.positions[:n] = torch.from_numpy(position)
        query_start_loc = torch.from_numpy(starts).to(torch.int32)
        logit_rows = torch.from_numpy(np.nonzero(offset >= num_heads[owner] - 1)[0])
        lookahead = self.proposer.lookahead
        trees = StepLayout.make(
            trees=lookahead.of_batch(batch),
            num_nodes=torch.from_numpy(num_rows),
            last_token_row=query_start_loc[1:].long() - 1,
            row_token_ids=self.input_ids[logit_rows].long(),
        )
        prepare_trees(
            trees,
            positions=[self.positions],
            input_ids=self.input_ids[:n],
            attn_groups=[self.draft_attn_groups],
        )
        self.positions[:n].clamp_(max=self.max_model_len - 1)
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=torch.from_numpy(first + lengths).to(torch.int32),
            num_reqs=batch,
            num_actual_tokens=n,
            max_query_len=int(lengths.max()),
            max_seq_len=int((first + lengths).max()),
            block_table_tensor=block_table,
            slot_mapping=torch.from_numpy(np.where(is_head, slots, PADDING_SLOT_ID)),
        )
        hidden = self._run_model(n, common)
        self.num_cached[idx_mapping] += num_heads
        if not looks_ahead:
            return None
        return self.model.compute_logits(hidden[logit_rows]).max(dim=1).indices

    def _run_model(self, num_tokens: int, common: CommonAttentionMetadata | None) -> torch.Tensor:
        metadata, slot_mapping = None, {}
        if common is not None:
            groups = self.draft_attn_groups
            metadata = {
                name: built
                for group in groups
                for built in (group.get_metadata_builder().build(0, common),)
                for name in group.layer_names
            }
            slot_mapping = dict.fromkeys(metadata, common.slot_mapping)
        with set_forward_context(
            metadata, self.vllm_config, num_tokens=num_tokens, slot_mapping=slot_mapping
        ):
            return self.model(
                input_ids=self.input_ids[:num_tokens],
                positions=self._get_positions(num_tokens),
                inputs_embeds=None,
            )
