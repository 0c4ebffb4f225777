"""The child of `step_time.py`: vLLM's engine in this process, stepped by hand.

    python -P step_time_engine.py TASK REPLY.json

TASK is a `Task` as JSON. A pass puts requests in, waits until all decode, times the steps from
result to result, and aborts the requests.
"""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_recycle.cli.bench.methods import needs_plugin

HAS_GPU = torch.cuda.is_available()
WARM_UP = 8  # steps after the last prompt
PROFILED = 10  # steps
LEFT_OUT = 0.2  # of a profile: its first part, in which the profiler itself starts


@dataclass(frozen=True, slots=True)
class Task:
    engine: dict[str, Any]  # arguments of `vllm.LLM`
    context: int  # tokens of a prompt
    batches: Sequence[int]
    steps: int
    passes: int
    trace: str | None  # where a profile goes


class Engine:
    """An engine whose trees are full and whose tokens are random, and what it schedules."""

    def __init__(self, task: Task) -> None:
        from vllm import LLM

        self.task = task
        llm = LLM(**task.engine)
        llm.apply_model(randomize)
        if needs_plugin(task.engine["speculative_config"]):
            llm.collective_rpc(fill_matrix)
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.request_ids = map(str, itertools.count())
        self.scheduled: list[tuple[int, int]] = []  # requests and rows of each step
        schedule = self.core.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.scheduled.append(
                (len(output.num_scheduled_tokens), output.total_num_scheduled_tokens)
            )
            return output

        self.core.scheduler.schedule = watched

    def describe(self) -> dict[str, Any]:
        import transformers
        import vllm

        config = self.engine.vllm_config
        modules = (vllm, torch, transformers)
        return {
            "versions": {module.__name__: module.__version__ for module in modules},
            "device": torch.cuda.get_device_name() if HAS_GPU else "cpu",
            "dtype": str(config.model_config.dtype),
            "max_model_len": config.model_config.max_model_len,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "model_runner": "V2" if config.use_v2_model_runner else "V1",
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "cudagraph_capture_sizes": config.compilation_config.cudagraph_capture_sizes,
            "kv_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        }

    def run(self, batch: int, *, trace: str | None) -> dict[str, Any]:
        self.scheduled.clear()
        emitted = dict.fromkeys(self._add_requests(batch), 0)
        while not all(emitted.values()):
            self._step(emitted)
        for _ in range(WARM_UP):
            self._step(emitted)
        stamps, totals = [time.perf_counter()], [sum(emitted.values())]
        for _ in range(self.task.steps):
            self._step(emitted)
            stamps.append(time.perf_counter())
            totals.append(sum(emitted.values()))
        timed = self.scheduled[-self.task.steps :]
        profile = None if trace is None else self._profile(emitted, trace)
        self.engine.abort_request(list(emitted))
        while self.core.batch_queue:  # what is in flight
            self.engine.step()
        return {
            "batch": batch,
            "step_ms": [1000 * (end - start) for start, end in itertools.pairwise(stamps)],
            "rows_scheduled": statistics.median(rows / requests for requests, rows in timed),
            "requests_scheduled": min(requests for requests, _ in timed),
            "tokens_per_step": (totals[-1] - totals[0]) / self.task.steps / batch,
            "context": self.task.context + totals[len(totals) // 2] / batch,
            "profile": profile,
        }

    def _add_requests(self, batch: int) -> list[str]:
        """With prompts of a random half that comes twice, so that there is something to draft."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        config, context = self.engine.model_config, self.task.context
        params = SamplingParams(
            temperature=0,
            max_tokens=config.max_model_len - context,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        ids = torch.randint(config.get_vocab_size(), (batch, -(-context // 2))).repeat(1, 2)
        prompts = [{"prompt_token_ids": row[:context]} for row in ids.tolist()]
        names = list(itertools.islice(self.request_ids, batch))
        for name, prompt in zip(names, self.engine.renderer.render_cmpl(prompts), strict=True):
            self.engine.add_request(name, prompt, params, arrival_time=time.time())
        return names

    def _step(self, emitted: dict[str, int]) -> None:
        """Step until there is a result; the first steps of an engine that runs ahead have none."""
        while not (results := self.engine.step()):
            pass
        for result in results:
            emitted[result.request_id] += len(result.outputs[0].token_ids)
            if result.finished:
                raise RuntimeError(f"request {result.request_id} ended while it was timed")

    def _profile(self, emitted: dict[str, int], trace: str) -> dict[str, Any]:
        """Of the device alone where there is one: to record the host as well slows it down."""
        from torch.profiler import ProfilerActivity, profile

        activity = ProfilerActivity.CUDA if HAS_GPU else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiler:
            for _ in range(PROFILED):
                self._step(emitted)
            if HAS_GPU:
                torch.cuda.synchronize()
        profiler.export_chrome_trace(trace)
        with gzip.open(trace, "rt") as stream:
            return {"trace": Path(trace).name, **find_gaps(json.load(stream)["traceEvents"])}


def randomize(model: torch.nn.Module) -> None:
    """Weights of a usual size, in place.

    vLLM's are so small that the next token depends on the last one alone: texts soon go in circles,
    every draft is accepted, and contexts grow faster with drafts than without.
    """
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(std=weight.shape[-1] ** -0.5)
        else:
            weight.data.fill_(1)


def fill_matrix(worker: Any) -> None:
    """Successors for every token, so that all nodes of all trees are filled; random ones."""
    matrix = worker.tree_drafter.state.matrix
    layout = matrix.layout
    tokens = torch.arange(layout.vocab_size, device=worker.device)
    successors = torch.randint_like(tokens, layout.vocab_size)[:, None] + tokens[: layout.k]
    successors %= layout.vocab_size
    # Entries of one token: a head, successors, and the salt of what is shared.
    entries = torch.cat((tokens[:, None] << 3, successors, torch.zeros_like(tokens)[:, None]), 1)
    matrix.table[: layout.vocab_size] = entries.int()


def find_gaps(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The longest idle time of the device and the idle share; None where nothing ran on one."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [event for event in events if event.get("cat") in kinds and event.get("ph") == "X"]
    found.sort(key=lambda event: event["ts"])
    if not found:
        return {"largest_gap_ms": None, "idle_share": None}
    first, last = found[0]["ts"], max(event["ts"] + event["dur"] for event in found)
    found = [event for event in found if event["ts"] >= first + LEFT_OUT * (last - first)]
    end, before = found[0]["ts"], found[0]["name"]
    idle, largest = 0.0, (0.0, "", "")
    for event in found:
        gap = event["ts"] - end
        idle += max(gap, 0.0)
        largest = max(largest, (gap, before, event["name"]))
        if event["ts"] + event["dur"] > end:
            end, before = event["ts"] + event["dur"], event["name"]
    return {
        "largest_gap_ms": largest[0] / 1000,
        "gap_after": largest[1],
        "gap_before": largest[2],
        "idle_share": idle / (end - found[0]["ts"]),
    }


def main() -> None:
    task, reply = Task(**json.loads(sys.argv[1])), Path(sys.argv[2])
    engine = Engine(task)
    described = engine.describe()
    most = described["kv_tokens"] // described["max_model_len"]
    if most < max(task.batches):
        sys.exit(f"--batch: got {max(task.batches)}, expected {most} at most, or a shorter context")
    passes = []
    for turn, batch in itertools.product(range(task.passes), task.batches):
        profiled = turn == task.passes - 1 and batch == task.batches[0]
        passes.append(engine.run(batch, trace=task.trace if profiled else None))
    reply.write_text(json.dumps({"engine": described, "passes": passes}))


if __name__ == "__main__":
    main()
