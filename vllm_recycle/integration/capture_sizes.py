"""The token counts that vLLM captures CUDA graphs for, where the user leaves them open.

Under speculation vLLM adds those of uniform batches of trees, for its own way to choose a graph
(`cuda.graph_sizes` has another). Piecewise graphs and those of plain decoding would be captured for
each of them too.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

# vLLM's largest, on a GPU of this family and on others.
BLACKWELL, LARGEST_ON_BLACKWELL, LARGEST = 100, 1024, 512
# Of these it captures every multiple.
STRIDE = 16


def largest_capture_size(engine_args: Any, num_nodes: int) -> int | None:
    """Tokens of the largest graph, as vLLM chooses it; it adds none where it is told.

    Args:
        engine_args: of the user.
        num_nodes: of the largest tree.

    Returns:
        The argument of the user where there are sizes of theirs.
    """
    names = ("max_cudagraph_capture_size", "cudagraph_capture_sizes")
    owners = (engine_args, engine_args.compilation_config)
    if any(getattr(owner, name) for owner in owners for name in names):
        return engine_args.max_cudagraph_capture_size
    is_blackwell = current_platform.is_device_capability_family(BLACKWELL)
    largest = LARGEST_ON_BLACKWELL if is_blackwell else LARGEST
    if engine_args.max_num_seqs is not None:
        largest = min(largest, 2 * engine_args.max_num_seqs * (num_nodes + 1))
    return -(-largest // STRIDE) * STRIDE
