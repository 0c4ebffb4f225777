"""A child process of the benchmark: one vLLM engine, asked over stdin, answering over stdout.

    {"op": "load", "engine": {...}, "prompts": [...]}                   -> what the engine runs with
    {"op": "run", "start": I, "stop": J, "concurrency": C, "max_tokens": N, "ignore_eos": B}
                                            -> one pass over the prompts from I to J, J excluded
    {"op": "acceptance", ...the same...}    -> the same, with how often each node was accepted
    {"op": "profile", ...the same...}    -> the same, with the time of a step by part; ask it last

Each request and each reply is one JSON line; {"error": "..."} stands for a failure. The process
ends when its stdin does. Requests are fed to the engine by hand, at most C in flight, which gives
exact counts: a step of a request is a decode step unless it is the one that ends its prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from vllm_recycle.cli.bench import profile, walks


@dataclasses.dataclass(slots=True)
class PassCounts:
    """What one pass over the prompts counts."""

    outputs: list[list[int]]  # token ids by prompt
    steps: int = 0  # decode steps, counted once for each request that took part
    engine_steps: int = 0
    decode_ms: list[float] = dataclasses.field(default_factory=list)  # engine steps without prompts
    parts_ms: dict[str, float] = dataclasses.field(default_factory=dict)  # of these steps, summed


class Worker:
    """One engine and the prompts that it runs."""

    def __init__(self, engine: dict[str, Any], prompts: list[str]) -> None:
        from vllm import LLM

        self.llm = LLM(**engine)
        self.engine = self.llm.llm_engine
        self.prompts = self.engine.renderer.render_cmpl([{"prompt": text} for text in prompts])
        self.method = (engine.get("speculative_config") or {}).get("method")
        self.timer: profile.ExclusiveTimer | None = None
        self.request_ids = map(str, itertools.count())

    def describe(self) -> dict[str, Any]:
        """Versions and settings, as they are in this process."""
        import torch
        import transformers
        import vllm

        config = self.engine.vllm_config
        return {
            "versions": {
                "vllm": vllm.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "device": torch.cuda.get_device_name()
            if config.device_config.device_type == "cuda"
            else config.device_config.device_type,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "compilation_mode": config.compilation_config.mode.name,
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
            "torch_threads": torch.get_num_threads(),
            "main_thread_cores": sorted(os.sched_getaffinity(0)),
        }

    def run(
        self, *, start: int, stop: int, concurrency: int, max_tokens: int, ignore_eos: bool
    ) -> dict[str, Any]:
        """One pass over these prompts in file order, `concurrency` of them in flight."""
        before, busy, begin = self._totals(), others_cpu_seconds(), time.perf_counter()
        counts = self._generate(self.prompts[start:stop], concurrency, max_tokens, ignore_eos)
        wall = time.perf_counter() - begin
        totals = {name: total - before[name] for name, total in self._totals().items()}
        num_cpus = os.cpu_count() or 1
        return {
            "wall_s": wall,
            "requests": len(counts.outputs),
            "tokens": sum(map(len, counts.outputs)),
            "steps": counts.steps,
            "engine_steps": counts.engine_steps,
            "step_ms": statistics.median(counts.decode_ms) if counts.decode_ms else None,
            **totals,
            "others_cpu_share": max(0.0, (others_cpu_seconds() - busy) / (wall * num_cpus)),
            "outputs": counts.outputs,
            "parts_ms": {
                name: value / len(counts.decode_ms) for name, value in counts.parts_ms.items()
            },
        }

    def profile(self, **arguments: Any) -> dict[str, Any]:
        """A pass with timers; they stay, so that no plain pass may follow."""
        import torch

        if self.timer is None:
            synchronize = torch.cuda.synchronize if torch.cuda.is_available() else None
            timer = profile.ExclusiveTimer(synchronize)
            if not profile.attach(self.engine, timer):
                return {"parts_ms": {}}
            self.timer = timer
        return self.run(**arguments)

    def acceptance(self, **arguments: Any) -> dict[str, Any]:
        """A pass that also counts the trees that were walked, and the walks through each row."""
        with walks.counted(self.engine) as counts:
            return self.run(**arguments) | {
                "trees": counts.trees,
                "passed": list(counts.passed.items()),
            }

    def _generate(
        self, prompts: list[Any], concurrency: int, max_tokens: int, ignore_eos: bool
    ) -> PassCounts:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            output_kind=RequestOutputKind.DELTA,
        )
        counts = PassCounts(outputs=[[] for _ in prompts])
        waiting = iter(enumerate(prompts))
        flying: dict[str, list[int]] = {}  # request id -> its output
        while True:
            for index, prompt in itertools.islice(waiting, concurrency - len(flying)):
                request_id = next(self.request_ids)
                self.engine.add_request(request_id, prompt, params, arrival_time=time.time())
                flying[request_id] = counts.outputs[index]
            if not flying:
                return counts
            self._step(flying, counts)

    def _step(self, flying: dict[str, list[int]], counts: PassCounts) -> None:
        decode_only = all(flying.values())
        start = time.perf_counter()
        if self.timer:
            self.timer.seconds.clear()
            self.timer.enter(profile.REST)
        results = self.engine.step()
        if self.timer:
            self.timer.leave()
        step_ms = 1000 * (time.perf_counter() - start)
        counts.engine_steps += 1
        if decode_only and results:
            counts.decode_ms.append(step_ms)
            for name, seconds in self.timer.seconds.items() if self.timer else ():
                counts.parts_ms[name] = counts.parts_ms.get(name, 0.0) + 1000 * seconds
        for result in results:
            output = flying[result.request_id]
            tokens = result.outputs[0].token_ids
            counts.steps += bool(output and tokens)
            output.extend(tokens)
            if result.finished:
                del flying[result.request_id]

    def _totals(self) -> dict[str, int]:
        """Counters of speculation since the start: vLLM's, and draft forwards where we count them.

        All ranks draft together, so that the first one speaks for all.
        """
        totals = {
            name: sum(
                metric.value
                for metric in self.llm.get_metrics()
                if metric.name == f"vllm:spec_decode_num_{name}"
            )
            for name in ("draft_tokens", "accepted_tokens")
        }
        if self.method == "ouroboros":
            statistics = self.llm.collective_rpc("draft_statistics")[0]
            totals |= {f"draft_{name}": number for name, number in statistics.items()}
        return totals


def others_cpu_seconds() -> float:
    """CPU time that all other processes of the machine have used; 0 where /proc is missing."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _iowait, *rest = map(int, stat.read_text().split()[1:9])
    mine = os.times()
    busy = user + nice + system + sum(rest)
    return busy / os.sysconf("SC_CLK_TCK") - mine.user - mine.system


def main() -> None:
    """Answer requests until stdin ends."""
    # What vLLM and its kernels print must not reach the driver: stdout becomes stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm  # noqa: F401 - slow, and not worth waiting for the first request

    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        try:
            if op == "load":
                worker = Worker(**request)
                reply = worker.describe()
            else:
                assert worker is not None
                passes = (worker.run, worker.profile, worker.acceptance)
                reply = {one.__name__: one for one in passes}[op](**request)
        except Exception as error:  # reported to the driver, which ends this process
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0]}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
