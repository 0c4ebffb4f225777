"""Token Recycling on Model Runner V2: all of it lives on the device.

Each request's tree has as many nodes as the largest size. What a row costs is not looked at on the
device: the scheduler is told what each node is worth, and takes the first nodes of each tree.
Topology is data, in buffers that never move, for the kernels of the next step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

from vllm_recycle.core.copies import Copies
from vllm_recycle.core.curve import TREES
from vllm_recycle.core.explore import GROW_EVERY
from vllm_recycle.core.grow import BEAM, Trunks
from vllm_recycle.core.learn import VerifiedStep
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.verification import NO_TOKEN, WalkResult
from vllm_recycle.integration.cuda.drafter import V2Drafter, V2Speculator
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.schedule.draft_sizes import DraftReport
from vllm_recycle.integration.token_recycling import TokenRecyclingDrafter
from vllm_recycle.kernels.triton.copies import DeviceCopies
from vllm_recycle.kernels.triton.matrix.count import DeviceCounts
from vllm_recycle.kernels.triton.matrix.fill import fill
from vllm_recycle.kernels.triton.matrix.find import Texts
from vllm_recycle.kernels.triton.matrix.grow import grow
from vllm_recycle.kernels.triton.matrix.learn import learn
from vllm_recycle.kernels.triton.matrix.seed import seed
from vllm_recycle.kernels.triton.top_k import top_k
from vllm_recycle.kernels.triton.trees import DeviceTrees
from vllm_recycle.kernels.triton.trunks import choose_trunks

# The most memory of a device for the texts that copies are searched in.
MAX_TEXT_BYTES = 1 << 30


class TokenRecyclingV2Drafter(TokenRecyclingDrafter, V2Drafter):
    """Grows a tree for each request, or fills a template.

    Attributes:
        template: that is filled; None where trees are grown.
        counts: what the state's counts are on the device.
        stamps: int32 [addresses], for learning; zero between steps.
        is_blind: bool [max_num_reqs], on the host, whether the prompt of each ends in no token.
        roots: int64 [max_num_reqs, 1], the path of each request where none has a tree.
        successors: int32 [logit rows, k], of the step.
        worths: float32 [batch, nodes], of the trees that were drafted last.
        device_copies: from the text of each request; None where a template is filled, or where
            texts would take too much memory of the device.
        trunks: of a draft model, by `req_state_idx`; None where there is none.

    """

    trunks: Trunks | None = None
    device_copies: DeviceCopies | None = None
    successors: torch.Tensor
    worths: torch.Tensor

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        options = self.options
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.seeds = options.seeds_from_prompts
        self.state = options.make_state(vllm_config, device)
        self.template = None if options.is_dynamic else options.load_tree().to(device)
        if self.template is None:
            nodes, depth = options.num_nodes, options.max_depth
            self.trees = DeviceTrees.empty(nodes, max_num_reqs, depth=depth, device=device)
        else:
            self.trees = DeviceTrees.of(self.template, max_num_reqs, device)
        self.counts = DeviceCounts.of(self.state.acceptance)
        table = self.state.matrix.table
        self.stamps = torch.zeros(len(table), dtype=torch.int32, device=device)
        self.is_blind = np.zeros(max_num_reqs, dtype=bool)
        self.roots = torch.zeros(max_num_reqs, 1, dtype=torch.int64, device=device)
        shape = max_num_reqs, vllm_config.model_config.max_model_len
        if self.template is None and 4 * math.prod(shape) <= MAX_TEXT_BYTES:
            # Under `isolated` nobody's counts reach another.
            copies = Copies(
                self.state.matrix.classes, options.max_depth, counts=not options.isolates
            )
            self.copies, self.device_copies = copies, DeviceCopies.empty(copies)
        # What is searched in each step is in device memory; else each prompt is copied once, and
        # the ends of texts are read.
        req_states.all_token_ids = StagedWriteTensor(
            shape,
            dtype=torch.int32,
            device=device,
            uva_instead_of_gpu=self.copies is None,
        )
        self.texts = Texts(req_states.all_token_ids.gpu, req_states.total_len.gpu)

    def make_speculator(self, may_speculate: np.ndarray) -> V2Speculator:
        return TokenRecyclingSpeculator(self, may_speculate)

    def reset(self) -> None:
        super().reset()
        self.counts.rates.copy_(self.state.acceptance.rates())

    def warm_up(self) -> None:
        self.take_in([0, 0], 0)
        if self.state.matrix.layout.has_shared:
            self.take_in([0, 0])

    @contextmanager
    def as_if_serving(self) -> Iterator[None]:
        """The first request has a text, below which whole trees are known."""
        layout, length = self.state.matrix.layout, self.texts.lengths[:1]
        text, end = _recurring_text(layout.vocab_size), self.texts.token_ids[0, : layout.reach]
        self.take_in(text, 0)
        end.copy_(torch.tensor(text[-len(end) :]))
        length.fill_(len(end))
        try:
            yield
        finally:
            end.zero_()
            length.zero_()

    def add_requests(self, requests: Sequence[NewRequest]) -> None:
        matrix = self.state.matrix
        if self.device_copies is not None:
            indices = [request.req_state_idx for request in requests]
            self.device_copies.begin(async_tensor_h2d(indices, device=self.device))
        for request in requests:
            index, text = request.req_state_idx, request.token_ids
            matrix.begin(index, request.request_class, request.owner)
            self.is_blind[index] = text[-1] == NO_TOKEN
            seeds = self.seeds and request.teaches
            if seeds and NO_TOKEN in text:  # in whose place vLLM has some token
                self.take_in(text, index)
            elif seeds:
                # A copy, since the kernel reads each token again and again.
                token_ids = self.texts.token_ids[index, : len(text)].clone()
                seed(matrix, self.stamps, index, token_ids)
            self.take_in(request.hint, index)

    def weights_changed(self) -> None:
        super().weights_changed()
        self.counts.rates.copy_(self.state.acceptance.rates())

    def take_in(self, token_ids: Sequence[int], req_state_idx: int | None = None) -> None:
        matrix = self.state.matrix
        if req_state_idx is None:
            matrix, req_state_idx = matrix.of_all(), 0
        if not token_ids:
            return
        text = async_tensor_h2d([*token_ids], device=matrix.table.device, dtype=torch.int32)
        seed(matrix, self.stamps, req_state_idx, text)

    def observe(self, input_batch: Any, row_token_ids: torch.Tensor, logits: torch.Tensor) -> None:
        self.successors = top_k(logits, self.state.matrix.layout.k)
        self.best_token_ids = self.successors[:, 0]

    def accept(
        self,
        input_batch: Any,
        row_token_ids: torch.Tensor,
        output: Any,
        path: torch.Tensor | None,
    ) -> None:
        matrix = self.state.matrix
        if path is None:
            path = self.roots[: input_batch.num_reqs]
        step = VerifiedStep(
            input_batch.idx_mapping,
            self.trees.parents,
            row_token_ids,
            input_batch.cu_num_logits,
            self.successors,
            WalkResult(path, output.sampled_token_ids.long(), output.num_sampled),
        )
        learns = output.num_sampled  # nothing in the middle of a prompt
        is_blind = self.is_blind[input_batch.idx_mapping_np] & input_batch.is_prefilling_np
        if is_blind.any():
            learns = learns.masked_fill(async_tensor_h2d(is_blind, device=learns.device), 0)
        learn(
            matrix,
            self.stamps,
            # Under `isolated` nobody's counts reach another: what is shipped serves.
            self.counts if matrix.layout.has_shared else None,
            self.texts,
            step,
            max_rows=1 + (self.trees.num_nodes if input_batch.num_draft_tokens else 0),
            learns=learns,
        )

    def propose(self, idx_mapping: torch.Tensor) -> torch.Tensor:
        """int64 [batch, nodes], -1 where there is no draft."""
        shape = (len(idx_mapping), self.trees.num_nodes)
        drafts = torch.empty(shape, dtype=torch.int64, device=idx_mapping.device)
        self.worths = torch.empty(shape, device=idx_mapping.device)
        arguments = (self.state.matrix, self.counts.rates, idx_mapping, self.texts)
        if self.template is None:
            trunks = self.find_trunks(idx_mapping)
            grow(drafts, self.worths, *arguments, trees=self.trees, beam=BEAM, trunks=trunks)
        else:
            fill(drafts, self.worths, *arguments, tree=self.template)
        return drafts

    def find_trunks(self, idx_mapping: torch.Tensor) -> Trunks | None:
        """The trunks to grow along, by `req_state_idx`: the surer one of each request."""
        if self.device_copies is None:
            return self.trunks
        copies = self.device_copies.draft(idx_mapping, self.texts)
        if self.trunks is None:
            return copies
        return choose_trunks(idx_mapping, copies, self.trunks)

    def describe(self) -> str:
        trees, num_bytes = self.trees, self.state.matrix.table.nbytes + self.stamps.nbytes
        name = "dynamic trees" if self.template is None else f"tree {self.template.name}"
        return (
            f"token_recycling: {name} of at most {trees.num_nodes} nodes and {trees.depth} levels, "
            f"{'no ' if self.copies is None else ''}copies, {self.state.describe()}, "
            f"{num_bytes:,} bytes"
        )


def _recurring_text(vocab_size: int) -> list[int]:
    """Tokens of which each is followed by the same one three times of four."""
    generator, num_kinds, text = random.Random(0), min(64, vocab_size), [0]
    while len(text) < 512:
        successor, is_regular = (5 * text[-1] + 1) % num_kinds, generator.random() < 0.75
        text.append(successor if is_regular else generator.randrange(num_kinds))
    return text


class TokenRecyclingSpeculator(V2Speculator):
    """Drafts for all requests of a step, or for none.

    Where sizes are chosen, it reports what the trees are worth.

    Args:
        drafter: that drafts.
        may_speculate: bool [max_num_reqs], on the host, by `req_state_idx`.

    Attributes:
        no_drafts: int64 [max_num_reqs, nodes], -1: what a step without drafts returns.
        plain_steps: how many steps have had no drafts, since the last one that had.
        report: of the trees that were drafted last, on its way to the host.
        kind: of the trees that this step drafts.

    """

    supports_mm_inputs = False
    draft_logits = None
    plain_steps = 0
    kind = TREES
    report: DraftReport | None = None

    def __init__(self, drafter: TokenRecyclingV2Drafter, may_speculate: np.ndarray) -> None:
        self.tree_drafter, self.may_speculate = drafter, may_speculate
        shape = (len(may_speculate), drafter.trees.num_nodes)
        self.no_drafts = torch.full(shape, NO_TOKEN, device=drafter.device)
        self.reports = settings_of(drafter.vllm_config).chooses_sizes

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        pass

    def capture(self) -> None:
        pass

    def take_report(self) -> DraftReport | None:
        report, self.report = self.report, None
        return report

    def drafting_runs(self) -> dict[int, Callable[[], Any]]:
        idx_mapping = self.no_drafts.new_zeros(1)
        # Trees of more requests grow at the same time.
        return {len(self.may_speculate): partial(self.tree_drafter.propose, idx_mapping)}

    def propose(
        self,
        input_batch: Any,
        *args: Any,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """int64 [batch, nodes], -1 where there is no draft.

        A request in the middle of its prompt gets drafts too, which are never scheduled.
        """
        if num_speculative_tokens is None:
            num_speculative_tokens = self.num_scheduled
        drafts_trees = num_speculative_tokens != 0 or self._looks(input_batch)
        self.prepare(input_batch, *args, drafts=drafts_trees, **kwargs)
        if not drafts_trees:
            return self.no_drafts[: input_batch.num_reqs]
        drafts = self.tree_drafter.propose(input_batch.idx_mapping)
        if self.reports:
            self._report(input_batch, num_speculative_tokens)
        return drafts

    def prepare(self, input_batch: Any, *args: Any, drafts: bool, **kwargs: Any) -> None:
        """Take in a step, before trees grow behind it, or none; the others are vLLM's."""

    def _looks(self, input_batch: Any) -> bool:
        """Whether trees are drafted that nobody verifies."""
        if not self.reports or not self._counted(input_batch).any():
            return False
        self.plain_steps += 1
        return self.plain_steps % GROW_EVERY == 1

    def _report(self, input_batch: Any, num_speculative_tokens: int | None) -> None:
        """Send what the trees are worth on its way."""
        if num_speculative_tokens:
            self.plain_steps = 0
        worths, is_counted = self.tree_drafter.worths, self._counted(input_batch)
        if not is_counted.all():
            indices = async_tensor_h2d(np.flatnonzero(is_counted), device=worths.device)
            worths = worths[indices]
        # On the stream of the step, so that it is there with the tokens of the next one.
        times, self.times = self.times, None
        worth = async_copy_to_np(worths.sum(0))
        self.report = DraftReport(worth, int(is_counted.sum()), self.kind, times)

    def _counted(self, input_batch: Any) -> np.ndarray:
        """bool [num_reqs], whose trees may be verified in the next step."""
        ends = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        has_text = ends >= input_batch.prefill_len_np  # all of its prompt is behind it
        return has_text & self.may_speculate[input_batch.idx_mapping_np]
