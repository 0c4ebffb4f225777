"""CUDA graphs without CUDA, for tests alone: launches are recorded, and made again.

As in a CUDA graph, the tensors of a replay are those of the recording, all of them, and nothing of
the Python that led to a launch is run again: not where it went, nor the numbers that it gave. What
is recorded are operators of torch and, each as one launch, functions wrapped in `launch`. Of what
CUDA would not let be captured, what reads a tensor on the host fails here too; copies from the host
to a device, of which there is one here, do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What reads a tensor on the host, which no graph can hold.
READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select"}
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Graph:
    """In the place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for launch in self.launches:
            launch()

    @property
    def num_kernels(self) -> int:
        """How many of the launches there are on a device: memory and views of it take none."""
        return sum(map(_is_kernel, self.launches))


def _is_kernel(launch: Any) -> bool:
    if launch.func is not _again:
        return True
    operator = launch.args[0]
    aliases = [one.alias_info for one in operator._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return not is_view and operator.overloadpacket.__name__ not in ALLOCATES


class Recording(TorchDispatchMode):
    """Runs operators, and puts them into a graph."""

    graph: Graph | None = None

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if Recording.graph is not None:
            assert operator.overloadpacket.__name__ not in READS, operator
            again = partial(_again, operator, args, kwargs or {}, result)
            Recording.graph.launches.append(again)
        return result


def _again(operator: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Run an operator into the tensors of its first run."""
    new = operator(*args, **kwargs)
    for mine, its in zip(tree_leaves(result), tree_leaves(new), strict=True):
        # Those of views, and of operators in place, are the arguments' own.
        if isinstance(mine, torch.Tensor) and mine.data_ptr() != its.data_ptr():
            mine.copy_(its)


def launch(function: Callable) -> Callable:
    """A function that is a launch: it is recorded whole."""

    @wraps(function)
    def launched(*args: Any, **kwargs: Any) -> Any:
        graph = Recording.graph
        with unrecorded():
            result = function(*args, **kwargs)
        if graph is not None:
            assert result is None
            graph.launches.append(partial(function, *args, **kwargs))
        return result

    return launched


@contextmanager
def unrecorded() -> Iterator[None]:
    """What is launched meanwhile enters no graph."""
    graph, Recording.graph = Recording.graph, None
    try:
        yield
    finally:
        Recording.graph = graph


@contextmanager
def record(graph: Graph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """In the place of `torch.cuda.graph`."""
    Recording.graph = graph
    try:
        with Recording():
            yield
    finally:
        Recording.graph = None


def install() -> None:
    """To be called after `v2_shim.install`."""
    from triton.runtime.interpreter import InterpretedFunction
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import flash_attn
    from vllm.v1.worker.gpu import cudagraph_utils

    InterpretedFunction.run = launch(InterpretedFunction.run)
    flash_attn.reshape_and_cache_flash = launch(flash_attn.reshape_and_cache_flash)
    # Else attention is an operator, which looks for its metadata in Python's state.
    type(current_platform).opaque_attention_op = lambda self: False
    type(current_platform)._global_graph_pool = object()
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, record  # type: ignore[misc, assignment]
    cudagraph_utils.graph_capture = lambda device: nullcontext()
    cudagraph_utils.capture_pool = lambda pool, vllm_config: nullcontext(pool)
    cudagraph_utils.current_stream = lambda: None
