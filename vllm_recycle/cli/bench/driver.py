"""The driver: one child process per method, one of them at work at a time.

A child is asked and answers over a connection (see `worker`). What it prints goes to a temporary
file; when the child dies the end of it is shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from multiprocessing import Pipe
from typing import Any

from vllm_recycle.cli import RunError
from vllm_recycle.cli.bench.methods import HINTS, SpeculativeConfig, needs_plugin
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.bench.progress import Progress

Reply = dict[str, Any]
WORKER = ("-m", "vllm_recycle.cli.bench.worker")
LOG_LINES = 20  # how many are shown of a child that died
KV_CACHE_BYTES = 2**30  # unless --engine-args says otherwise
WARM_UP_TOKENS = 16  # per request, at each concurrency other than that of the first pass
SAMPLING = ("max_tokens", "ignore_eos", "temperature")
EXIT_SECONDS = 20.0
PLUGIN_GROUPS = (  # those that vLLM loads without being asked
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The replies of all children, by method and concurrency."""

    engines: dict[str, Reply] = field(default_factory=dict)
    first_passes: dict[str, Reply] = field(default_factory=dict)
    passes: dict[tuple[str, int], list[Reply]] = field(default_factory=dict)  # one per repeat


class Child:
    """A worker process that holds the engine of one method."""

    def __init__(self, name: str, config: SpeculativeConfig) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        self._connection, far_end = Pipe()
        with far_end:
            self._process = subprocess.Popen(
                [sys.executable, *WORKER, str(far_end.fileno())],
                pass_fds=[far_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=child_environment(config),
                start_new_session=True,  # Ctrl-C reaches the driver alone, which ends its children
            )

    def ask(self, op: str, **arguments: Any) -> Reply:
        """Send one request and wait for its reply; raises what `follow` does."""
        *_, reply = self.follow(op, **arguments)
        return reply

    def follow(self, op: str, **arguments: Any) -> Iterator[Reply]:
        """Send one request, yield what the child tells meanwhile, and last its reply.

        Raises RunError if the child reports an error or dies.
        """
        reply: Reply = {"event": "begin"}
        try:
            self._connection.send({"op": op, **arguments})
            while "event" in reply:
                # A grandchild may hold the far end open: the process is looked at as well.
                while not self._connection.poll(0.5):
                    if self._process.poll() is not None:
                        raise EOFError
                reply = self._connection.recv()
                if "error" in reply:
                    raise self._failure(f"failed: {reply['error']}")
                yield reply
        except (EOFError, OSError):
            raise self._failure("died") from None

    def leave(self) -> None:
        """Ask the process to end."""
        self._connection.close()

    def end(self, *, patience: float) -> None:
        """End the process and all that it started, `patience` seconds after it was asked to."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _failure(self, outcome: str) -> RunError:
        if outcome == "died":  # its pipe may end a moment before the process does
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
        size = os.fstat(self._log.fileno()).st_size
        # pread leaves the file offset alone, which the child shares.
        tail = os.pread(self._log.fileno(), 2**16, max(0, size - 2**16)).decode(errors="replace")
        lines = [line for line in tail.splitlines() if line.strip()][-LOG_LINES:]
        status = self._process.poll()
        ending = "" if status is None else f" (exit status {status})"
        print("\n".join([f"last lines of method {self.name!r}:", *lines]), file=sys.stderr)
        return RunError(f"method {self.name!r} {outcome}{ending}")


def child_environment(config: SpeculativeConfig) -> dict[str, str]:
    """The caller's environment.

    The children of vLLM's own methods do not load this plugin: `VLLM_PLUGINS` names all others
    that would be loaded (an empty value loads none).
    """
    environment = {**os.environ}
    if not needs_plugin(config):
        points = [point for group in PLUGIN_GROUPS for point in entry_points(group=group)]
        own_names = {point.name for point in points if point.value.startswith("vllm_recycle.")}
        allowlist = os.environ.get("VLLM_PLUGINS")
        names = {point.name for point in points} if allowlist is None else set(allowlist.split(","))
        environment["VLLM_PLUGINS"] = ",".join(sorted(names - own_names))
    return environment


@contextlib.contextmanager
def children(plan: Plan) -> Iterator[dict[str, Child]]:
    """A child for each method; none is left behind, however the run ends."""
    workers: dict[str, Child] = {}
    patience = 0.0
    # A termination leaves through `finally` too.
    old_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for name, config in plan.methods.items():
            workers[name] = Child(name, config)
        yield workers
        patience = EXIT_SECONDS
    finally:
        for child in workers.values():
            child.leave()
        for child in workers.values():
            child.end(patience=patience)
        signal.signal(signal.SIGTERM, old_handler)


def measure(plan: Plan) -> Measurement:
    """Run all methods of a plan: load, first pass, timed repeats."""
    measurement = Measurement()
    steps = 2 + len(plan.concurrency) * plan.repeats
    with Progress(len(plan.methods) * steps, unit="parts") as progress:
        for part in parts(plan):
            with children(part) as workers:
                _measure(part, workers, measurement, progress)
    return measurement


def parts(plan: Plan) -> Iterator[Plan]:
    """Plans for the methods whose engines are alive together."""
    methods = list(plan.methods.items())
    while methods:
        yield dataclasses.replace(plan, methods=dict(methods[: plan.max_engines]))
        methods = methods[plan.max_engines or len(methods) :]


def _measure(
    plan: Plan, workers: dict[str, Child], measurement: Measurement, progress: Progress
) -> None:
    for name, config in plan.methods.items():  # one after another: they share caches on disk
        progress.begin(f"load {name}")
        measurement.engines[name] = load(plan, workers[name], config)
    for name, child in workers.items():
        progress.begin(f"first pass {name}")
        measurement.first_passes[name] = first_pass(plan, child)
    for turn in range(plan.repeats):
        for concurrency in plan.concurrency:
            number = plan.pass_number(turn, concurrency)
            for name in rotate(list(workers), turn):
                progress.begin(f"{name} x{concurrency}, {turn + 1}/{plan.repeats}")
                reply = workers[name].ask("run", **pass_arguments(plan, concurrency, number))
                measurement.passes.setdefault((name, concurrency), []).append(reply)


def load(plan: Plan, child: Child, config: SpeculativeConfig) -> Reply:
    """Make a child's engine."""
    engine = engine_arguments(plan, config)
    changes = {} if child.name == HINTS else {"hint": None}
    prompts = [dataclasses.asdict(prompt) | changes for prompt in plan.prompts]
    return child.ask("load", engine=engine, prompts=prompts, chat=plan.chat)


def first_pass(plan: Plan, child: Child) -> Reply:
    """One untimed pass over the prompts from a cold start, then a warm-up of the other levels."""
    reply = child.ask("run", **pass_arguments(plan, plan.first_pass_concurrency, 0))
    for concurrency in plan.concurrency:
        if concurrency != plan.first_pass_concurrency:
            child.ask("run", **warm_up_arguments(plan, concurrency))
    return reply


def engine_arguments(plan: Plan, config: SpeculativeConfig) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; all that is not here is vLLM's default."""
    return {
        "model": plan.model,
        "dtype": plan.dtype,
        "seed": 0,
        "max_num_seqs": max(plan.concurrency),
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        # A GPU must have this part free when an engine starts, and others live there.
        "gpu_memory_utilization": 0.01,
        "enable_prefix_caching": False,
        # What each request drafted and accepted; refused where nothing is.
        **({"per_request_spec_decode_metrics": "summary"} if config else {}),
        "speculative_config": config,
        **plan.engine_args,
    }


def pass_arguments(plan: Plan, concurrency: int, number: int) -> dict[str, Any]:
    """What a child is asked for pass `number`, 0 the first one."""
    start, stop = plan.prompts_of(number)
    sampling = {name: getattr(plan, name) for name in SAMPLING}
    return {"start": start, "stop": stop, "concurrency": concurrency, **sampling}


def warm_up_arguments(plan: Plan, concurrency: int) -> dict[str, Any]:
    """Those of a short pass at a concurrency, over the first prompts."""
    arguments = pass_arguments(plan, concurrency, 0)
    stop, max_tokens = min(arguments["stop"], concurrency), min(plan.max_tokens, WARM_UP_TOKENS)
    return arguments | {"stop": stop, "max_tokens": max_tokens}


def rotate(names: list[str], turn: int) -> list[str]:
    """The order of one round: each round begins with the next method."""
    turn %= len(names)
    return names[turn:] + names[:turn]
