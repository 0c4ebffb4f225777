"""LoRA on Model Runner V2: which adapter each row of a step has."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.worker.gpu.lora_utils import LoraState


class TreeLoraState(LoraState):
    """vLLM's, with an adapter for each logit row of a tree where vLLM has one for each request.

    Else the head of an adapter would be applied to the wrong rows.

    Attributes:
        num_logits: int32 [num_reqs], logit rows of each request of the step, set by the runner.

    """

    num_logits: np.ndarray

    def make_lora_inputs(self, *args: Any, **kwargs: Any) -> tuple[tuple, tuple, set]:
        prompt_lora_mapping, *other_inputs = super().make_lora_inputs(*args, **kwargs)
        return tuple(np.repeat(prompt_lora_mapping, self.num_logits)), *other_inputs
