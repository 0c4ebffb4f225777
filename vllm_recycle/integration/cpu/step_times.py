"""What rows cost on this engine: steps of the real model, timed at start-up."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from vllm_recycle.core import BatchTrees
from vllm_recycle.core.dynamic import StepTimes
from vllm_recycle.integration.cpu.tree_batch import TreeBatch
from vllm_recycle.integration.drafter import fingerprint

T = TypeVar("T")
Points = dict[int, dict[int, float]]  # by length of context and rows, seconds of a step
FORMAT = "vllm_recycle.step_times/1"

# In the order of how much they tell; a matrix product may work in tiles of 16 rows.
ROWS = (16, 4, 48, 8, 2, 17, 32, 96, 192, 256)
CONTEXTS = (256, 2048)
ROUNDS = 5
MAX_SECONDS = 1.2  # for a length of context, but for the fewest rows and the most


def find_step_times(runner: Any, max_rows: int, file: str | None) -> tuple[StepTimes, str]:
    """The times of steps: of a file where there is one, else measured, and written there.

    Args:
        runner: a `TreeCPUModelRunner` whose KV cache is there, and which has no requests.
        max_rows: the most rows that a time is needed for.
        file: JSON; None to measure at each start.

    Returns:
        The times, and a line that says what was found.

    Raises:
        ValueError: the file is of another engine or machine, or none of ours.

    """
    most = _most_rows(runner, max_rows)
    if most < 2:
        return StepTimes.linear(0.0, max_rows), "no step has room for a draft"
    started, is_first = time.perf_counter(), get_tp_group().rank_in_group == 0
    points = None
    if file and is_first and Path(file).exists():
        points = _read(file, runner, most)
    points = from_first_rank(points)
    if known := points is not None:
        origin = f"read from {file}"
    else:
        points = from_first_rank(_measure(runner, most))
        origin = f"measured in {time.perf_counter() - started:.1f} s"
    if file and not known and is_first:
        content = {"format": FORMAT, "engine": _engine(runner, most), "seconds": points}
        partial = Path(f"{file}.{os.getpid()}")  # replicas may read it meanwhile
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(file)
    first = min(points)
    shown = ", ".join(f"{rows}: {1e3 * points[first][rows]:.1f}" for rows in sorted(points[first]))
    return StepTimes.measured(points, max_rows), (
        f"a step by its rows, in ms, behind {first} tokens: {shown}; {origin} for contexts "
        f"{list(points)}"
    )


def _most_rows(runner: Any, max_rows: int) -> int:
    """Rows of the largest step of one request that can be timed."""
    nodes = runner.drafter.proposer.num_nodes
    return min(max_rows, runner.max_num_tokens, 1 + nodes, runner.max_model_len - 1)


def _engine(runner: Any, most: int) -> dict[str, Any]:
    """What times of steps depend on."""
    config = runner.vllm_config
    return {
        "model": fingerprint(config.model_config),
        "dtype": str(config.model_config.dtype),
        "quantization": config.model_config.quantization,
        "compilation_mode": str(config.compilation_config.mode),
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "threads": torch.get_num_threads(),
        "cpu": current_platform.get_device_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "most rows": most,
    }


def _read(file: str, runner: Any, most: int) -> Points:
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format is {content['format']!r}, expected {FORMAT!r}")
        for key, expected in _engine(runner, most).items():
            if content["engine"].get(key) != expected:
                got = content["engine"].get(key)
                raise ValueError(f"{key} is {got!r}, expected {expected!r}")
        points = {
            int(context): {int(rows): float(seconds) for rows, seconds in times.items()}
            for context, times in content["seconds"].items()
        }
        if not points or any(
            1 not in times or len(times) < 2 or not 0 < min(times.values()) < math.inf
            for times in points.values()
        ):
            raise ValueError("seconds are not of one row and of more")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"step_times_file {file}: {error}; remove it to measure again") from error
    return points


def _measure(runner: Any, most: int) -> Points:
    """Time steps of one request with trees of several sizes behind contexts of several lengths."""
    sizes = [1, most, *(rows for rows in ROWS if rows < most)]
    longest = runner.max_model_len - most
    contexts = [context for context in CONTEXTS if context <= longest] or [longest]
    return {context: _time_steps(runner, sizes, context) for context in contexts}


def _time_steps(runner: Any, sizes: list[int], context: int) -> dict[int, float]:
    """Seconds of a step by its rows; the sizes take turns, so that a disturbance hits all."""
    ends = sizes[:2]
    for rows in ends:
        _time_step(runner, rows, context)  # what is slow at the first time only
    times: dict[int, list[float]] = {}
    started = time.perf_counter()
    for rows in [*ends, *sizes * ROUNDS]:
        if len(times) > 1 and not from_first_rank(time.perf_counter() - started < MAX_SECONDS):
            break
        times.setdefault(rows, []).append(_time_step(runner, rows, context))
    # What is beyond the shortest is somebody else's.
    return {rows: min(seconds) for rows, seconds in times.items()}


def from_first_rank(value: T) -> T:
    """What the first of the tensor-parallel ranks has, which must all do and draft alike."""
    group = get_tp_group()
    return group.broadcast_object(value) if group.world_size > 1 else value


@torch.inference_mode()
def _time_step(runner: Any, rows: int, context: int) -> float:
    """Seconds of a forward of one request, with its logits and what is done with these."""
    parents = torch.arange(-1, rows - 1).clamp(min=0)[None]
    trees = TreeBatch.make(
        trees=BatchTrees.from_parents(parents),
        num_nodes=torch.tensor([rows - 1]),
        last_token_row=torch.tensor([rows - 1]),
        row_token_ids=torch.zeros(rows, dtype=torch.int64),
    )
    started = time.perf_counter()
    for groups in runner.attn_groups:
        for group in groups:
            group.get_metadata_builder().trees = trees
    # One request of all rows: a uniform one, which is at most as long as the largest draft.
    hidden, _ = runner._dummy_run(
        rows,
        force_attention=True,
        uniform_decode=True,
        skip_eplb=True,
        profile_seq_lens=context + rows,
    )
    logits = runner.model.compute_logits(hidden[:rows])
    runner.drafter.observe(torch.zeros(1, dtype=torch.int64), trees, logits)
    logits.argmax(dim=-1)
    return time.perf_counter() - started
