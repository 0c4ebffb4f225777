"""Token Recycling along the chains of a speculator of vLLM's, on Model Runner V2.

vLLM's speculator drafts behind a step as if a chain had been verified: heads read the target's
hidden states, token ids and positions at the accepted rows, which after a walk are brought to the
rows that a chain has. Its chain is the trunk of the trees. Its layers keep vLLM's attention, and
write their KV to the slots of a chain, so nothing moves in their cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode import init_speculator
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from vllm_recycle.core.curve import TREES, TRUNKS
from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.trunk import CHOICES
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cuda.along_trunks import AlongTrunks
from vllm_recycle.integration.cuda.drafter import V2Speculator
from vllm_recycle.integration.cuda.token_recycling import TokenRecyclingSpeculator
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.options.base import TABLE
from vllm_recycle.integration.schedule.step_note import note_of
from vllm_recycle.integration.start.attention_override import original_backend
from vllm_recycle.kernels.triton.top_k import top_k


def move_rows(
    tensors: Iterable[torch.Tensor],
    logits_indices: torch.Tensor,
    cu_num_logits: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """Move the rows of each accepted path to the first rows of its request.

    Args:
        tensors: [tokens, ...] each, what a step has for each of its tokens; changed in place.
        logits_indices, cu_num_logits, path: as for `kv_cache.compact_path`.

    """
    places = torch.arange(path.shape[1], device=path.device)
    # Behind the end of a path its root is moved to where it is.
    pairs = torch.stack((path, places.where(path >= 0, 0))).clamp(min=0)
    sources, targets = logits_indices[cu_num_logits[:-1, None] + pairs].flatten(1).unbind()
    for rows in tensors:
        rows.index_copy_(0, targets, rows[sources])


class HostedTrunkV2Drafter(AlongTrunks):
    """Grows trees along what vLLM's speculator drafts.

    Attributes:
        path: int64 [num_reqs, path], the visited rows of the step; None where no request had a
            tree.

    """

    path: torch.Tensor | None = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        options = settings_of(vllm_config).options
        super().__init__(vllm_config, device, req_states, length=options.trunk_length)

    def make_speculator(self, may_speculate: np.ndarray) -> V2Speculator:
        config = copy.copy(self.vllm_config)
        config.speculative_config = spec = copy.copy(config.speculative_config)
        spec.num_speculative_tokens = self.length  # not those of a tree
        setattr(spec, TABLE, None)
        speculator = init_speculator(config, self.device, self.req_states)
        host_class = type(speculator)
        if host_class not in HOSTED:
            raise NotImplementedError(
                f"token_recycling does not support a trunk by {host_class.__name__}; change it, or "
                "leave it out"
            )
        # Only vLLM knows which class its speculator has to be of; ours adds to it.
        speculator.__class__ = HOSTED[host_class]
        speculator.host(self, may_speculate)
        return speculator

    def accept(
        self, input_batch: Any, row_token_ids: torch.Tensor, output: Any, path: torch.Tensor | None
    ) -> None:
        super().accept(input_batch, row_token_ids, output, path)
        self.path = path

    def describe(self) -> str:
        method = self.vllm_config.speculative_config.method
        return f"trunks of at most {self.length} tokens by vLLM's {method}; {super().describe()}"


class HostedSpeculator(V2Speculator):
    """What the classes below have before a speculator of vLLM's and `TokenRecyclingSpeculator`.

    Attributes:
        token_ids: int64 [length, max_num_reqs, CHOICES], the best tokens at each place of a chain.
        probabilities: float32, of these.

    """

    tree_drafter: Any
    kind = TRUNKS

    def host(self, drafter: HostedTrunkV2Drafter, may_speculate: np.ndarray) -> None:
        """Complete what vLLM has made."""
        TokenRecyclingSpeculator.__init__(self, drafter, may_speculate)
        shape = drafter.length, self.max_num_reqs, CHOICES
        self.token_ids = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=self.device)
        self.probabilities = torch.zeros(shape, device=self.device)
        self.req_states = drafter.req_states

    def load_draft_model(self, *args: Any) -> torch.nn.Module:
        with original_backend():
            return super().load_draft_model(*args)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        # vLLM's full graphs of a head's prefill are for chains of one length, and for as many
        # requests as the target's graph has, which trees are not padded to.
        mixed_mode = cudagraph_mode.mixed_mode()
        mode = mixed_mode if mixed_mode == CUDAGraphMode.PIECEWISE else CUDAGraphMode.NONE
        manager_type, rows = type(self.decode_cudagraph_manager), self.tree_drafter.length + 1
        self.prefill_cudagraph_manager = manager_type(self.vllm_config, self.device, mode, rows)

    def sample_draft(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The best token of each row, int64 [rows]; the best ones are kept."""
        logits = self.compute_draft_logits(hidden_states, 0)
        best_token_ids = top_k(logits, CHOICES).long()
        shift = logits.float().logsumexp(dim=1, keepdim=True)
        probabilities = (logits.gather(1, best_token_ids).float() - shift).exp()
        step, rows = self.current_draft_step.view(1), len(best_token_ids)
        self.token_ids[:, :rows].index_copy_(0, step, best_token_ids[None])
        self.probabilities[:, :rows].index_copy_(0, step, probabilities[None])
        return best_token_ids[:, 0].contiguous()

    def update_requests(self, scheduler_output: Any) -> None:
        self.kind = note_of(scheduler_output).kind

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return TokenRecyclingSpeculator.propose(self, *args, **kwargs)

    def prepare(self, input_batch: Any, *args: Any, drafts: bool, **kwargs: Any) -> None:
        """Draft trunks, if the step is to have some; a head reads each step, even without."""
        path, self.tree_drafter.path = self.tree_drafter.path, None
        is_dummy = kwargs.get("dummy_run")
        has_trunks = drafts and self.kind != TREES
        if path is not None and not is_dummy:
            last_hidden_states, aux_hidden_states = args[2:4]
            states = aux_hidden_states or [last_hidden_states]
            tensors = (input_batch.input_ids, input_batch.positions, *states)
            move_rows(tensors, input_batch.logits_indices, input_batch.cu_num_logits, path)
        length = self.tree_drafter.length if is_dummy or has_trunks else 0
        super().propose(input_batch, *args, num_speculative_tokens=length, **kwargs)
        if is_dummy:
            return
        drafter, idx_mapping = self.tree_drafter, input_batch.idx_mapping
        drafter.count_trunks(idx_mapping)
        if not has_trunks:
            drafter.leave_out(idx_mapping)
            return
        tensors = (self.token_ids[:, : len(idx_mapping)], self.probabilities[:, : len(idx_mapping)])
        drafter.take_trunks(idx_mapping, Trunks(*(values.transpose(0, 1) for values in tensors)))
        is_counted = self._counted(input_batch)
        drafter.num_rounds += int(is_counted.sum())
        if not is_counted.all():
            indices = async_tensor_h2d(np.flatnonzero(~is_counted), device=self.device)
            drafter.leave_out(idx_mapping[indices])

    # What drafting takes.

    def plain_runs(self) -> dict[int, Callable[[], Any]]:
        return {batch: partial(self._run_dummy, batch, batch, 0) for batch in self._batches()}

    def alone_runs(self) -> dict[int, Callable[[], Any]]:
        return self._runs(0)

    def drafting_runs(self) -> dict[int, Callable[[], Any]]:
        return self._runs(self.tree_drafter.length)

    def _batches(self) -> list[int]:
        return sorted({1, min(self.max_num_reqs, self.max_num_tokens)})

    def _runs(self, length: int) -> dict[int, Callable[[], Any]]:
        """A round of so many tokens behind the most rows that a step may have, and trees."""
        self.tree_drafter.leave_out(self.no_drafts.new_zeros(1))
        [grow] = TokenRecyclingSpeculator.drafting_runs(self).values()

        def draft(batch: int) -> None:
            rows = min(batch * (1 + self.tree_drafter.trees.num_nodes), self.max_num_tokens)
            self._run_dummy(batch, rows, length)
            grow()

        return {batch: partial(draft, batch) for batch in self._batches()}

    def _run_dummy(self, batch: int, rows: int, length: int) -> None:
        states = self.req_states
        dummy_batch = InputBatch.make_dummy(batch, rows, self.target_input_buffers)
        counts = torch.ones(batch, dtype=torch.int32, device=self.device)
        hidden_states = torch.zeros(rows, self.hidden_size, dtype=self.dtype, device=self.device)
        super().propose(
            dummy_batch, None, None, hidden_states, None, counts, torch.zeros_like(counts),
            states.last_sampled_tokens, states.next_prefill_tokens, self.temperature, self.seeds,
            dummy_run=True, skip_attn_for_dummy_run=True, num_speculative_tokens=length,
        )  # fmt: skip


class HostedEagle(HostedSpeculator, EagleSpeculator, TokenRecyclingSpeculator):
    """That of EAGLE and EAGLE-3."""


class HostedMTP(HostedSpeculator, MTPSpeculator, TokenRecyclingSpeculator):
    """That of the heads that models have themselves."""


# By vLLM's speculators that draft place by place, what they become.
HOSTED = {EagleSpeculator: HostedEagle, MTPSpeculator: HostedMTP}
