"""Ouroboros on the V1 runner: vLLM's draft model, drafting by lookahead forwards.

The draft model's layers share the block table with the target's. A forward has for each request
first its head: the tokens that the draft model's KV cache lacks. Their keys and values are written.
Behind the last of them come the rows of lookahead decoding, a tree whose keys and values are never
written. Each step takes in the tokens that the target has computed in it, before vLLM can give
their blocks to another request as its prefix. Where the target rejects drafted tokens that the
cache took in, `DraftedTexts` counts the cache back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.models import supports_multimodal
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from vllm_recycle.core.acceptance import NodeAcceptance
from vllm_recycle.core.adjacency import Ends
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.ouroboros import OuroborosProposer
from vllm_recycle.core.price import TREES
from vllm_recycle.core.verification import NO_TOKEN, WalkResult
from vllm_recycle.integration.cpu.drafter import V1Drafter
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.cpu.time_steps import ROUNDS
from vllm_recycle.integration.drafter import from_first_rank
from vllm_recycle.integration.ouroboros import (
    describe,
    group_of_draft_layers,
    make_proposer,
    refuse_shared_caches,
)
from vllm_recycle.kernels.cpu import native_operations

NOTHING = np.empty(0, dtype=np.int64)


class OuroborosV1Drafter(V1Drafter, DraftModelProposer):
    """Drafts with vLLM's draft model, which vLLM loads and gives a KV cache.

    The target verifies the nodes of a draft that are worth their rows.

    Attributes:
        acceptance: what the nodes of a draft are worth.
        drafted: int64 [max_num_reqs, nodes], the last draft of each request, whole.
        known: how much of each text the draft's KV cache holds.

    """

    proposer: OuroborosProposer

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        DraftModelProposer.__init__(self, vllm_config, device, runner)
        V1Drafter.__init__(self, vllm_config)
        # This drafts after vLLM's bookkeeping, when the tokens of the step are on the host. vLLM's
        # own proposer was made before this one, and refuses the flag.
        self.speculative_config.disable_padded_drafter_batch = True
        self.proposer = make_proposer(vllm_config, native_operations(), device, stops_early=True)
        self.state = self.proposer.pool
        tree, max_num_reqs = self.proposer.tree, vllm_config.scheduler_config.max_num_seqs
        self.acceptance = NodeAcceptance(tree)
        self.drafted = torch.full((max_num_reqs, tree.num_nodes), NO_TOKEN)
        self.known = DraftedTexts(max_num_reqs, self.proposer.shape.gamma)

    # What vLLM asks of a draft model.

    def load_model(self, target_model: Any) -> None:
        if supports_multimodal(target_model):
            # vLLM asks it for its token of an image, which not all have; here it is text alone.
            target_model = target_model.get_language_model()
        DraftModelProposer.load_model(self, target_model)
        refuse_shared_caches(self.attention_layers, self.compilation_config)

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        group_of_draft_layers(kv_cache_config, self.attention_layers)

    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """One forward; vLLM's makes one for every draft token."""
        self.run(num_tokens)

    # What our runner asks of a drafter.

    @property
    def attention_layers(self) -> Set[str]:
        return self._draft_attn_layer_names

    def begin(self, req_state_idx: int, token_ids: torch.Tensor, num_computed_tokens: int) -> None:
        self.proposer.begin(torch.full_like(token_ids, req_state_idx), token_ids)
        self.known.begin(req_state_idx, num_computed_tokens)
        self.drafted[req_state_idx] = NO_TOKEN

    def release(self, req_state_indices: Sequence[int]) -> None:
        self.proposer.release(req_state_indices)

    def observe(self, idx_mapping: torch.Tensor, step: StepLayout, logits: torch.Tensor) -> None:
        owners = idx_mapping.repeat_interleave(step.cu_num_logits.diff())
        self.proposer.observe(owners, step.row_token_ids, logits, step.cu_num_logits)

    def accept(
        self, idx_mapping: torch.Tensor, step: StepLayout, walked: WalkResult, ends: Ends
    ) -> None:
        self.acceptance.count(self.drafted[idx_mapping], walked)
        self.drafted[idx_mapping] = NO_TOKEN

    def draft(self, texts: TextEnds, num_nodes: int, block_tables: Any) -> Drafts:
        """Draft, and take in what the target has computed of every text, drafted for or not."""
        batch, last, text = len(texts.idx_mapping), np.array(texts.ends.last), texts.ends.token_ids
        table = block_tables[self.kv_cache_gid]
        slots = table.num_blocks_per_row[:batch].astype(np.int64) * table.block_size
        # The width is the context's, which vLLM may shorten to what fits the KV cache.
        room = np.minimum(slots, text.shape[1]) - last - 1
        chosen = np.nonzero((np.array(texts.max_depths) > 0) & (room >= 0))[0]
        self.known.follow(texts)
        drafting = Round(self, texts, table.get_device_tensor(batch))
        drafting.catch_up(len(chosen))
        tree = self.proposer.tree
        drafts: list[list[int]] = [[] for _ in range(batch)]
        if len(chosen):
            drafted = self.proposer.propose(
                texts.idx_mapping[chosen],
                text[chosen, last[chosen]].long(),
                draft_model=drafting,
                room=torch.from_numpy(room[chosen]),
            )
            self.drafted[texts.idx_mapping[chosen]] = drafted
            times = self.step_times[TREES].at(batch, float(last.mean()))
            worths, others = self.acceptance.worths(drafted), batch - len(chosen)
            worths = worths[:, :num_nodes]
            counts, _ = native_operations().choose(worths, times, num_other_rows=others)
            of_each = zip(chosen.tolist(), drafted.tolist(), counts.tolist(), strict=True)
            for index, draft, count in of_each:
                drafts[index] = draft[:count]
        parents = tree.parents[1:].tolist()
        return drafts, [parents[: len(draft)] for draft in drafts]

    @torch.inference_mode()
    def judge(self, step_seconds: float) -> str:
        forwards, rows = self.proposer.max_forwards, 1 + self.proposer.lookahead.num_nodes
        seconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            self.model.compute_logits(self.run(rows))
            seconds.append(time.perf_counter() - started)
        share = from_first_rank(forwards * min(seconds) / step_seconds)
        times = self.step_times[TREES].at(1, 0)
        reached = 1 + self.proposer.tree.depths.cummax(0).values
        costs = share + times[1 : len(reached) + 1]
        pays = bool((reached[: len(costs)] > costs)[1:].any())
        return (
            f"; drafting takes {share:.2f} of a step, {forwards} forwards of {rows} rows: it pays "
            f"above {float(costs[1]):.1f} tokens a step"
            + ("" if pays else ", more than any draft can give: leave the method out")
        )

    def reset(self) -> None:
        super().reset()
        self.acceptance.clear()

    def describe(self) -> str:
        return describe(self.proposer, self.vllm_config)

    def statistics(self) -> dict[str, float]:
        counted = {"rounds": self.proposer.num_rounds, "forwards": self.proposer.num_forwards}
        return super().statistics() | counted

    def run(
        self,
        num_tokens: int,
        common: CommonAttentionMetadata | None = None,
        step: StepLayout | None = None,
    ) -> torch.Tensor:
        """One forward of the model, by the inputs that were put into its buffers.

        Args:
            num_tokens: of the forward.
            common: vLLM's metadata of it; None where there is no KV cache to attend to.
            step: the trees among its rows, which have no KV slots.

        """
        metadata: dict[str, Any] | None = None
        slot_mapping: dict[str, torch.Tensor] = {}
        if common is not None:
            metadata = {}
            for group in self.draft_attn_groups:
                builder = group.get_metadata_builder()
                built = builder.build_step(common, step, are_cached=False)
                metadata |= dict.fromkeys(group.layer_names, built)
            slot_mapping = dict.fromkeys(metadata, common.slot_mapping)
        with set_forward_context(
            metadata, self.vllm_config, num_tokens=num_tokens, slot_mapping=slot_mapping
        ):
            return self.model(
                input_ids=self.input_ids[:num_tokens],
                positions=self._get_positions(num_tokens),
                inputs_embeds=None,
            )


class DraftedTexts:
    """How much of each text the draft's KV cache holds.

    Attributes:
        num_cached: int64 [max_num_reqs], tokens of each text.
        trunks: int64 [max_num_reqs, gamma], those of them that were drafted in the last round, from
            the token at `starts`, int64 [max_num_reqs], on; padded with -1.

    """

    def __init__(self, max_num_reqs: int, gamma: int) -> None:
        self.num_cached, self.starts = np.zeros((2, max_num_reqs), dtype=np.int64)
        self.trunks = np.full((max_num_reqs, gamma), NO_TOKEN)

    def begin(self, req_state_idx: int, num_computed_tokens: int) -> None:
        """A request starts, of which so many tokens are in the cache."""
        self.num_cached[req_state_idx] = num_computed_tokens
        self.trunks[req_state_idx] = NO_TOKEN

    def follow(self, texts: TextEnds) -> None:
        """Count each cache back to the first token that differs from the draft; a round begins."""
        idx_mapping, computed = texts.idx_mapping.numpy(), np.array(texts.ends.last)
        trunks, starts = self.trunks[idx_mapping], self.starts[idx_mapping]
        place = starts[:, None] + np.arange(trunks.shape[1])
        index = np.arange(len(idx_mapping))[:, None]
        token_ids = texts.ends.token_ids.numpy()
        text = token_ids[index, place.clip(max=token_ids.shape[1] - 1)]
        agrees = (text == trunks) & (place < computed[:, None])
        kept = starts + np.cumprod(agrees, axis=1).sum(axis=1)
        was_drafted = trunks[:, 0] != NO_TOKEN
        cached = np.where(was_drafted, kept, self.num_cached[idx_mapping])
        self.num_cached[idx_mapping] = np.minimum(cached, computed)
        self.starts[idx_mapping], self.trunks[idx_mapping] = computed + 1, NO_TOKEN

    def note(self, req_state_idx: int, end: int, new: np.ndarray) -> None:
        """Tokens that were drafted are taken in, behind the first `end` of a text."""
        start = end - self.starts[req_state_idx]
        if start >= 0:
            self.trunks[req_state_idx, start : start + len(new)] = new


class Round:
    """The draft forwards behind a step; see `vllm_recycle.core.ouroboros.DraftModel`.

    Args:
        drafter: whose model is run.
        texts: of the step.
        block_table: int32 [batch, blocks], of the draft's layers.

    """

    def __init__(
        self, drafter: OuroborosV1Drafter, texts: TextEnds, block_table: torch.Tensor
    ) -> None:
        self.drafter, self.known, self.block_table = drafter, drafter.known, block_table
        self.token_ids, self.idx_mapping = texts.ends.token_ids.numpy(), texts.idx_mapping.numpy()
        # By req_state_idx: the place in the batch, and how many tokens of the text were taken in or
        # are in the runner's.
        self.index, self.ends = np.zeros((2, len(self.known.num_cached)), dtype=np.int64)
        self.index[self.idx_mapping] = np.arange(len(self.idx_mapping))
        self.ends[self.idx_mapping] = texts.ends.last

    def catch_up(self, num_drafting: int) -> None:
        """Take in what cannot wait for the first draft forward, or does not fit into it.

        In one forward, since a request may already read what another one writes in this step.
        """
        idx_mapping = self.idx_mapping
        behind = self.ends[idx_mapping] - self.known.num_cached[idx_mapping]
        rows = behind.sum() + num_drafting * (1 + self.drafter.proposer.lookahead.num_nodes)
        if num_drafting < len(idx_mapping) or rows > self.drafter.max_num_tokens:
            chosen = idx_mapping[behind > 0]
            if len(chosen):
                heads = [self._unseen(req_state_idx) for req_state_idx in chosen]
                self._run(chosen, heads, [NOTHING] * len(chosen))

    def forward(
        self, idx_mapping: torch.Tensor, new_token_ids: torch.Tensor, row_token_ids: torch.Tensor
    ) -> torch.Tensor:
        """int64 [batch, nodes + 1]; in as many forwards as the rows need."""
        rows = row_token_ids.numpy()
        # Rows behind the last one that is filled would be computed for nothing.
        num_rows = np.where(rows >= 0, np.arange(1, rows.shape[1] + 1), 0).max(axis=1)
        heads = []
        for req_state_idx, new in zip(idx_mapping.tolist(), new_token_ids.numpy(), strict=True):
            new = new[new >= 0]
            heads.append(np.concatenate((self._unseen(req_state_idx), new)))
            self.known.note(req_state_idx, self.ends[req_state_idx], new)
            self.ends[req_state_idx] += len(new)
        outputs = torch.zeros(len(rows), 1 + rows.shape[1], dtype=torch.int64)
        num_tokens = num_rows + [len(head) for head in heads]
        first, most = 0, self.drafter.max_num_tokens
        while first < len(rows):
            fitting = np.searchsorted(num_tokens[first:].cumsum(), most, "right")
            chunk = slice(first, first + max(1, int(fitting)))
            counts = num_rows[chunk]
            tries = [row[:count] for row, count in zip(rows[chunk], counts, strict=True)]
            hidden = self._run(idx_mapping[chunk].numpy(), heads[chunk], tries)
            found = self.drafter.model.compute_logits(hidden).max(dim=1).indices
            there = torch.arange(outputs.shape[1]) <= torch.from_numpy(counts)[:, None]
            outputs[chunk][there] = found
            first = chunk.stop
        return outputs

    def _unseen(self, req_state_idx: int) -> np.ndarray:
        """What the draft's cache lacks of a text."""
        unseen = slice(self.known.num_cached[req_state_idx], self.ends[req_state_idx])
        return self.token_ids[self.index[req_state_idx], unseen]

    def _run(
        self, idx_mapping: np.ndarray, heads: Sequence[np.ndarray], rows: Sequence[np.ndarray]
    ) -> torch.Tensor:
        """One forward of the model.

        Args:
            idx_mapping: int64 [batch].
            heads: of each, the next tokens that its cache lacks, at least one.
            rows: of each, those of `lookahead` below the last of these.

        Returns:
            [n, hidden size], at the last token of each head and at its rows, one request after the
            other.

        """
        drafter = self.drafter
        num_heads, num_rows = np.array([[*map(len, heads)], [*map(len, rows)]])
        lengths = num_heads + num_rows
        starts = np.concatenate(([0], lengths.cumsum()))
        owner = np.repeat(np.arange(len(idx_mapping)), lengths)
        offset = np.arange(starts[-1]) - starts[owner]
        position = self.known.num_cached[idx_mapping][owner] + offset
        logit_rows = torch.from_numpy(np.nonzero(offset >= num_heads[owner] - 1)[0])
        pairs = zip(heads, rows, strict=True)
        token_ids = np.concatenate([part for pair in pairs for part in pair])

        input_ids, positions = (
            buffer[: len(owner)] for buffer in (drafter.input_ids, drafter.positions)
        )
        input_ids.copy_(torch.from_numpy(token_ids))
        positions.copy_(torch.from_numpy(position))
        step = StepLayout.make(
            trees=drafter.proposer.lookahead.of_batch(len(idx_mapping)),
            num_nodes=num_rows.tolist(),
            last_token_row=(starts[1:] - 1).tolist(),
            row_token_ids=token_ids[logit_rows.numpy()],
        )
        step.place([positions], input_ids.numpy())
        positions.clamp_(max=drafter.max_model_len - 1)
        is_head = offset < num_heads[owner]
        block_table = self.block_table[torch.from_numpy(self.index[idx_mapping])]
        size = drafter.block_size
        block = (position // size).clip(max=block_table.shape[1] - 1)
        slots = block_table.numpy()[owner, block] * size + position % size
        query_start_loc = torch.from_numpy(starts).to(torch.int32)
        seq_lens = self.known.num_cached[idx_mapping] + lengths
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=torch.from_numpy(seq_lens).to(torch.int32),
            num_reqs=len(lengths),
            num_actual_tokens=len(owner),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=block_table,
            slot_mapping=torch.from_numpy(np.where(is_head, slots, PADDING_SLOT_ID)),
        )
        hidden = drafter.run(len(owner), common, step)
        self.known.num_cached[idx_mapping] += num_heads
        return hidden[logit_rows]
