"""The `Operations` in plain torch: what is correct."""

from __future__ import annotations

from vllm_recycle.core.copies import draft_copies as draft_copies
from vllm_recycle.core.copies import learn_copies as learn_copies
from vllm_recycle.core.draft import draft as draft
from vllm_recycle.core.learn import learn as learn
from vllm_recycle.core.learn import seed as seed
from vllm_recycle.core.learn import top_k as top_k
from vllm_recycle.core.verification import walk as walk
