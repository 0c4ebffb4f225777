"""vLLM's draft model on the V1 runner, and how much of each text its KV cache holds.

A forward has for each request first its head: the tokens that the draft model's KV cache lacks.
Their keys and values are written. Behind the last of them come rows that look ahead, a tree whose
keys and values are never written. A text is taken in when it is drafted for. What a round drafted
is forgotten with it; what the target accepts of it is taken in again.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.model_executor.models import supports_multimodal
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.draft_blocks import DraftBlocks
from vllm_recycle.integration.ouroboros import group_of_draft_layers, refuse_shared_caches
from vllm_recycle.kernels.cpu import calls

NOTHING = np.empty(0, dtype=np.int64)


class DraftModel(DraftModelProposer):
    """Loads and runs it; for a drafter to inherit.

    Args:
        vllm_config, device, runner: as vLLM gives them.
        lookahead: the rows of a forward behind the head of a request.

    Attributes:
        num_cached: int64 [max_num_reqs], how much of each text the draft's KV cache holds.
        blocks: which blocks it has.

    """

    blocks: DraftBlocks

    def __init__(
        self, vllm_config: Any, device: torch.device, runner: Any, *, lookahead: TreeTemplate
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self.lookahead = lookahead
        self.num_cached = np.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=np.int64)

    # What vLLM asks of a draft model.

    def load_model(self, target_model: Any) -> None:
        if supports_multimodal(target_model):
            # vLLM asks it for its token of an image, which not all have; here it is text alone.
            target_model = target_model.get_language_model()
        super().load_model(target_model)
        refuse_shared_caches(self.attention_layers, self.compilation_config)

    def validate_same_kv_cache_group(self, kv_cache_config: Any) -> None:
        layers = self.attention_layers
        group = group_of_draft_layers(kv_cache_config, layers, self.max_model_len)
        block_size = kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        self.blocks = DraftBlocks(kv_cache_config.num_blocks, block_size)

    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """One forward; vLLM's makes one for every draft token."""
        self.run(num_tokens)

    @property
    def attention_layers(self) -> Set[str]:
        """Names of its attention layers."""
        return self._draft_attn_layer_names

    def follow(self, scheduler_output: Any, index_of: dict[str, int]) -> None:
        """Take in which requests start in a step, and which blocks are given out."""
        begun = self.blocks.follow(scheduler_output, index_of, self.kv_cache_gid)
        for req_state_idx, num_cached, _ in begun:
            self.num_cached[req_state_idx] = num_cached

    def room(self, texts: TextEnds, block_tables: Any) -> np.ndarray:
        """int64 [batch], the tokens that may be drafted behind the last one of each text."""
        table, ends = block_tables[self.kv_cache_gid], np.array(texts.ends.last_positions)
        slots = table.num_blocks_per_row[: len(ends)].astype(np.int64) * table.block_size
        # The width is the context's, which vLLM may shorten to what fits the KV cache.
        return np.minimum(slots, texts.ends.token_ids.shape[1]) - ends - 1

    def begin_round(self, texts: TextEnds, block_tables: Any) -> Round:
        """The forwards behind a step."""
        table = block_tables[self.kv_cache_gid]
        return Round(self, texts, table.get_device_tensor(len(texts.idx_mapping)))

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
                group_metadata = builder.build_step(common, step, are_cached=False)
                metadata |= dict.fromkeys(group.layer_names, group_metadata)
            slot_mapping = dict.fromkeys(metadata, common.slot_mapping)
        with set_forward_context(
            metadata, self.vllm_config, num_tokens=num_tokens, slot_mapping=slot_mapping
        ):
            return self.model(
                input_ids=self.input_ids[:num_tokens],
                positions=self._get_positions(num_tokens),
                inputs_embeds=None,
            )


class Round:
    """The draft forwards behind a step.

    Args:
        drafter: whose model is run.
        texts: of the step.
        block_table: int32 [batch, blocks], of the draft's layers.

    Attributes:
        num_cached: int64 [max_num_reqs], how much of each text the draft's KV cache holds, with
            what was drafted.

    """

    def __init__(self, drafter: DraftModel, texts: TextEnds, block_table: torch.Tensor) -> None:
        self.drafter, self.block_table = drafter, block_table
        self.token_ids, self.idx_mapping = texts.ends.token_ids.numpy(), texts.idx_mapping.numpy()
        self.num_cached = drafter.num_cached.copy()
        # By req_state_idx: the place in the batch, and how many tokens of the text the target has
        # computed.
        self.index, self.computed = np.zeros((2, len(self.num_cached)), dtype=np.int64)
        self.index[self.idx_mapping] = np.arange(len(self.idx_mapping))
        self.computed[self.idx_mapping] = texts.ends.last_positions

    def choose(
        self,
        idx_mapping: torch.Tensor,
        new_token_ids: torch.Tensor,
        row_token_ids: torch.Tensor,
        choices: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `vllm_recycle.core.trunk.DraftModel`; in as many forwards as the rows need."""
        rows, most = row_token_ids.numpy(), self.drafter.max_num_tokens
        shape = len(rows), 1 + rows.shape[1], choices
        token_ids, chances = torch.full(shape, NO_TOKEN), torch.zeros(shape, dtype=torch.float64)
        # Rows behind the last one that is filled would be computed for nothing.
        num_rows = np.where(rows >= 0, np.arange(1, shape[1]), 0).max(axis=1, initial=0)
        heads = []
        for req_state_idx, new_ids in zip(idx_mapping.tolist(), new_token_ids.numpy(), strict=True):
            # What the cache lacks of the text, and what is new.
            unseen = slice(self.num_cached[req_state_idx], self.computed[req_state_idx])
            unseen_ids = self.token_ids[self.index[req_state_idx], unseen]
            heads.append(np.concatenate((unseen_ids, new_ids[new_ids >= 0])))
        num_tokens, start = num_rows + np.array([*map(len, heads)]), 0
        while start < len(rows):
            if num_tokens[start] > most and len(heads[start]) > 1:
                part, heads[start] = np.split(heads[start], [min(most, len(heads[start]) - 1)])
                self._run(idx_mapping[start : start + 1].numpy(), [part], [NOTHING])
                num_tokens[start] -= len(part)
                continue
            fitting = np.searchsorted(num_tokens[start:].cumsum(), most, "right")
            chunk = slice(start, start + max(1, int(fitting)))
            counts = num_rows[chunk]
            tries = [row[:count] for row, count in zip(rows[chunk], counts, strict=True)]
            hidden = self._run(idx_mapping[chunk].numpy(), heads[chunk], tries)
            logits = self.drafter.model.compute_logits(hidden)
            is_run = torch.from_numpy(np.arange(shape[1]) <= counts[:, None])
            best = calls.top_k(logits, choices)[0].long().clamp(min=0)  # NaN have none
            token_ids[chunk][is_run] = best
            if choices > 1:
                logits = logits.float()
                logs = logits.gather(1, best) - logits.logsumexp(dim=1, keepdim=True)
                chances[chunk][is_run] = logs.exp().nan_to_num(0.0).double()
            start = chunk.stop
        return token_ids, chances

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
        position = self.num_cached[idx_mapping][owner] + offset
        logit_rows = torch.from_numpy(np.nonzero(offset >= num_heads[owner] - 1)[0])
        pairs = zip(heads, rows, strict=True)
        token_ids = np.concatenate([part for pair in pairs for part in pair])

        input_ids, positions = (
            buffer[: len(owner)] for buffer in (drafter.input_ids, drafter.positions)
        )
        input_ids.copy_(torch.from_numpy(token_ids))
        positions.copy_(torch.from_numpy(position))
        step = StepLayout.make(
            trees=drafter.lookahead.of_batch(len(idx_mapping)),
            num_nodes=num_rows.tolist(),
            last_token_row=(starts[1:] - 1).tolist(),
            row_token_ids=token_ids[logit_rows.numpy()],
        )
        step.place([positions], input_ids.numpy())
        positions.clamp_(max=drafter.max_model_len - 1)
        places = np.where(offset < num_heads[owner], position, -1)
        common = self._metadata(idx_mapping, starts, places)
        hidden = drafter.run(len(owner), common, step)
        self.num_cached[idx_mapping] += num_heads
        taken_in = np.minimum(self.num_cached, self.computed)[idx_mapping]
        drafter.num_cached[idx_mapping] = taken_in
        drafter.blocks.mark(idx_mapping, taken_in)
        return hidden[logit_rows]

    def _metadata(
        self, idx_mapping: np.ndarray, starts: np.ndarray, places: np.ndarray
    ) -> CommonAttentionMetadata:
        """vLLM's metadata of a forward.

        Args:
            idx_mapping: int64 [batch].
            starts: int64 [batch + 1], the first row of each request.
            places: int64 [rows], in the text, of the rows that have a KV slot; -1 of the others.

        """
        lengths, size = np.diff(starts), self.drafter.block_size
        owner = np.repeat(np.arange(len(lengths)), lengths)
        block_table = self.block_table[torch.from_numpy(self.index[idx_mapping])]
        block = (places // size).clip(max=block_table.shape[1] - 1)
        slots = block_table.numpy()[owner, block] * size + places % size
        query_start_loc = torch.from_numpy(starts).to(torch.int32)
        seq_lens = self.num_cached[idx_mapping] + lengths
        return CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=torch.from_numpy(seq_lens).to(torch.int32),
            num_reqs=len(lengths),
            num_actual_tokens=len(owner),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=block_table,
            slot_mapping=torch.from_numpy(np.where(places < 0, PADDING_SLOT_ID, slots)),
        )
