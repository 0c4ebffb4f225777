"""The `Operations` in plain torch: what is correct."""

from __future__ import annotations

from vllm_recycle.core.draft import draft as draft
from vllm_recycle.core.learn import learn as learn
from vllm_recycle.core.learn import seed as seed
from vllm_recycle.core.learn import top_k as top_k
from vllm_recycle.core.verification import walk as walk
