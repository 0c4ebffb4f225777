"""How much of a text the draft model's KV cache lacks on a GPU.

What it has is watched in `test_ouroboros`.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_recycle.integration.cuda.ouroboros.cache import DraftCache
from vllm_recycle.integration.draft_blocks import DraftBlocks


def test_no_more_is_missing_than_the_text_has():
    cache = DraftCache(1, DraftBlocks(num_blocks=16, block_size=4), torch.device("cpu"))
    states, computed = np.array([0]), np.array([10])
    cache.see(states, computed, computed)
    cache.take(states, computed, computed)
    for _ in range(100):
        # Of each step it is known later that all of its drafts but one were rejected.
        computed += 2
        cache.see(states, np.array([17]), computed + 15)
    assert cache.max_missing[0] == 200 + 15
    # More than there is was taken in.
    cache.take(states, np.array([215]), computed)
    cache.see(states, np.array([17]), computed + 17)
    assert cache.max_missing[0] == 17
