"""Applying the masks of grammars on Model Runner V2, one for each row that a step has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_recycle.integration.schedule.grammar import rows_of_masks


class GrammarRows:
    """vLLM's `StructuredOutputsWorker`, taken for one of requests that have one row each.

    vLLM keeps, and from 0.33 on sends, a mask for every node that each request could have: 1.07 GB
    for 1,024 requests, 64 rows and a vocabulary of 128k. Here masks lie one behind the other, and
    none is of a row that is not there.

    Args:
        worker: vLLM's, whose buffer becomes smaller.
        num_rows: the most of a step.

    """

    def __init__(self, worker: Any, num_rows: int) -> None:
        self.worker = worker
        worker.mask_stride = 1
        worker.grammar_bitmask = worker.grammar_bitmask[:num_rows].clone()
        self.starts_np = np.arange(num_rows + 1)

    def mask(self, logits: torch.Tensor, input_batch: Any, output: Any) -> None:
        """Forbid, in logits [rows, vocab], what vLLM's `GrammarOutput` does."""
        rows = rows_of_masks(output, input_batch.req_ids, input_batch.cu_num_logits_np)
        num_rows = len(logits)
        batch = SimpleNamespace(
            req_ids=range(num_rows),
            # Made anew: what is made with the weights is lost in a deep sleep.
            cu_num_logits=torch.arange(num_rows + 1, dtype=torch.int32, device=logits.device),
            # The next two for vLLM 0.32.
            cu_num_logits_np=self.starts_np[: num_rows + 1],
            num_draft_tokens_per_req=None,
        )
        # vLLM's own warm-up brings more masks than there are rows, which allow all.
        self.worker.apply_grammar_bitmask(logits, batch, rows, output.grammar_bitmask[: len(rows)])
