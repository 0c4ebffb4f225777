"""What all tests run under."""

from __future__ import annotations

import os

# The engine in the test's own process; tests of servers and of several ranks say otherwise.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# vLLM leaves a core to its front end, which has nothing to do meanwhile.
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
