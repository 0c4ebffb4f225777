"""`python -m vllm_recycle`, the same as the `vllm-recycle` script."""

from __future__ import annotations

import sys

from vllm_recycle.cli import main

sys.exit(main())
