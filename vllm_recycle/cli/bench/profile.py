"""Where the time of an engine step goes: exclusive timers around methods of a live vLLM engine.

Every instant of a step counts once, for the innermost timed method that is running. Methods are
replaced on their classes, for good: profile last, in a process that measures nothing afterwards.
On a GPU the device is synchronized at each switch, so that its work counts where it was asked for.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

OWN = "own"
TREE_ATTENTION = "tree_attention"
FORWARD = ("forward", "attention", TREE_ATTENTION, "logits")  # the target's forward pass
REST = "engine"  # all of a step that has no timer of its own
PACKAGE = "vllm_recycle"

RUNNER_METHODS = {
    "execute_model": "runner",
    "sample_tokens": "runner",
    "_update_states": "inputs",
    "_prepare_inputs": "inputs",
    "_build_attention_metadata": "attention_metadata",
    "_model_forward": "forward",
    "_bookkeeping_sync": "bookkeeping",
    "propose_draft_token_ids": "draft",
}
SCHEDULER_METHODS = {
    "schedule": "schedule",
    "update_from_output": "scheduler_update",
    "update_draft_token_ids": "scheduler_update",
}


class ExclusiveTimer:
    """Seconds by category; an outer category pauses while an inner one runs."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0
        self._synchronize = synchronize

    def enter(self, category: str) -> None:
        self._charge()
        self._open.append(category)

    def leave(self) -> None:
        self._charge()
        self._open.pop()

    def wrap(self, function: Callable[..., Any], category: str) -> Callable[..., Any]:
        """The same function, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(category)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        timed.__dict__["timed"] = True
        return timed

    def _charge(self) -> None:
        if self._synchronize:
            self._synchronize()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def attach(engine: Any, timer: ExclusiveTimer) -> bool:
    """Put timers into a `vllm.LLMEngine` that runs in this process.

    Returns whether the model's forward pass was found; without it there is no profile.
    """
    core = engine.engine_core.engine_core
    wrapper = getattr(core.model_executor, "driver_worker", None)
    worker: Any = getattr(wrapper, "worker", None)
    runner: Any = getattr(worker, "model_runner", None)
    if not hasattr(runner, "_model_forward"):
        return False
    _time(runner, RUNNER_METHODS, timer)
    _time(core.scheduler, SCHEDULER_METHODS, timer)
    _time(runner.get_model(), {"compute_logits": "logits"}, timer)
    for name in ("sampler", "rejection_sampler"):
        _time(getattr(runner, name, None), {"forward": "sampling"}, timer)
    _time(engine.output_processor, {"process_outputs": "outputs"}, timer)
    for layer in runner.compilation_config.static_forward_context.values():
        implementation = getattr(layer, "impl", None)
        _time(implementation, {"forward": TREE_ATTENTION}, timer, own=True)
        _time(implementation, {"forward": "attention"}, timer)
    builders = [g.get_metadata_builder() for groups in runner.attn_groups for g in groups]
    for owner in (runner, worker, core.scheduler, *builders):
        _time_own(owner, timer)
    return True


def _time_own(owner: Any, timer: ExclusiveTimer) -> None:
    """Time all methods of this package's classes, and what each of them overrides."""
    names = {
        name
        for kind in type(owner).__mro__
        if _is_own(kind)
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("__")
    }
    _time(owner, dict.fromkeys(names, OWN), timer, own=True)
    _time(owner, dict.fromkeys(names, "overridden"), timer)


def _time(
    owner: Any, categories: dict[str, str], timer: ExclusiveTimer, *, own: bool = False
) -> None:
    """Time methods where the classes of `owner` define them: this package's, or the others."""
    for kind in type(owner).__mro__:
        for name, category in categories.items() if _is_own(kind) == own else ():
            function = vars(kind).get(name)
            if inspect.isfunction(function) and not hasattr(function, "timed"):
                setattr(kind, name, timer.wrap(function, category))


def _is_own(kind: type) -> bool:
    return kind.__module__.split(".")[0] == PACKAGE
