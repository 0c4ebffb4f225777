"""Token Recycling and Ouroboros for vLLM: train-free speculative decoding with trees.

Importing this package imports neither torch nor vllm; vLLM finds the plugin through the
entry point `vllm.general_plugins` (see `vllm_recycle.integration.plugin`).
"""

from __future__ import annotations

__version__ = "0.2.0"
