"""Engines of Model Runner V2 that sleep: what goes at each level, and what must still be there.

On a GPU vLLM takes memory from pools by what it is for, and gives up that of some while it sleeps.
Here such memory is overwritten in its place. The draft model has a window, as it may where no text
can reach beyond it.
"""

from __future__ import annotations

from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu_worker import Worker

from tests.integration.cuda.test_ouroboros import FORWARDS
from tests.integration.cuda.v2_engines import GREEDY, GROWN, LLM_ARGUMENTS, MODEL, SEEDED, tokens_of
from tests.integration.cuda.v2_worker import TreeV2Worker
from tests.integration.cuda.watched_rounds import SIZES
from tests.integration.engines import OUROBOROS, counter, engine, runner
from tests.integration.models.derived_models import with_windows
from tests.integration.models.random_models import gemma4

pytestmark = pytest.mark.slow

SHORT = {"max_tokens": 8}
DIGITS = {"structured_outputs": {"regex": "[0-9]{3,9}"}}
BATCH = [
    ((0, 36), GREEDY | SHORT),
    ((3, 20), SEEDED | SHORT),
    ((0, 30), GREEDY | SHORT | DIGITS),
]
GARBAGE = 0x3F  # as any byte: a small number, or an integer that is no place of anything


@pytest.mark.parametrize("method", ["trees", "ouroboros"])
def test_tokens_and_what_was_learnt_are_the_same_after_each_sleep(result, method):
    found = result[method]
    assert all(tokens == result["plain"] for tokens in found["token ids"])
    assert all(before == after for before, after in found["known"])
    first, *later = found["accepted tokens"]
    assert min(later) >= first > 0
    # Memory was given up.
    light, deep = found["bytes overwritten"]
    assert 0 < light < deep


def test_a_draft_model_whose_layers_share_a_kv_cache_is_refused(result):
    named = "layers share a KV cache, as draft_model.model.layers.2.self_attn.attn does"
    assert named in result["refused"]


class Pool(TorchDispatchMode):
    """Knows the memory that is taken while it is on, and what that is for."""

    memory: dict[int, tuple[str, torch.UntypedStorage]] = {}  # noqa: RUF012 - of all pools
    is_of_host = False

    def __init__(self, tag: str) -> None:
        super().__init__()
        self.tag = tag

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = storages_of((args, kwargs))
        output = function(*args, **(kwargs or {}))
        for pointer, storage in storages_of(output).items():
            if pointer not in given and not Pool.is_of_host:
                Pool.memory[pointer] = (self.tag, storage)  # of the innermost pool
        return output


def storages_of(values: Any) -> dict[int, torch.UntypedStorage]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


class Overwriting(SleepModeBackend):
    """Keeps what vLLM's own backend keeps."""

    num_bytes: list[int] = []  # noqa: RUF012 - of each sleep

    def suspend(self, level: int = 1) -> None:
        kept = ("runtime", "cudagraph", *(("weights",) if level == 1 else ()))
        self.backups, lost = [], 0
        for tag, storage in Pool.memory.values():
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            if tag in kept:
                self.backups.append((memory, memory.clone()))
            else:
                lost += len(memory)
            memory.fill_(GARBAGE)
        self.num_bytes.append(lost)

    def resume(self, tags: list[str] | None = None) -> None:
        for memory, backup in self.backups:
            memory.copy_(backup)


def sleep_as_on_a_gpu() -> None:
    """Let workers take memory from pools, and vLLM's own functions for sleep run."""

    def sleep(worker: Any, level: int = 1) -> None:
        patterns = worker.model_config.sleep_preserve_parameter_names if level == 2 else ()
        parameters = worker._get_sleep_parameters(worker.model_runner.model)
        kept = {
            name: parameter.detach().clone()
            for name, parameter in parameters.items()
            if any(fnmatch(name, pattern) for pattern in patterns)
        }
        Worker.sleep(worker, level)
        worker._sleep_saved_parameters = kept  # vLLM leaves out what is on a CPU

    def of_host(init: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> None:
            before, Pool.is_of_host = Pool.is_of_host, True
            init(*args, **kwargs)
            Pool.is_of_host = before

        return made

    for kind in (buffer_utils.NonUvaBuffer, buffer_utils.UvaBackedTensor):
        kind.__init__ = of_host(kind.__init__)
    SleepModeBackendFactory._registry["cumem"] = lambda: Overwriting
    CpuPlatform.is_sleep_mode_available = lambda self: True
    torch.accelerator.synchronize = lambda *args: None
    torch.accelerator.get_memory_info = lambda *args: (0, 0)
    TreeV2Worker._maybe_get_memory_pool_context = lambda self, tag: Pool(tag)
    TreeV2Worker.sleep, TreeV2Worker.wake_up = sleep, Worker.wake_up


def known(llm: Any) -> str:
    """What a drafter knows, in short."""
    tensors = runner(llm).tree_drafter.state.tensors.values()
    return sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def serve(method: dict[str, Any]) -> dict[str, Any]:
    """In the process with the engines: an engine that sleeps at each level."""
    Pool.memory.clear()
    Overwriting.num_bytes.clear()
    found: dict[str, Any] = {"known": [], "token ids": [], "accepted tokens": []}
    with engine(method, **LLM_ARGUMENTS, enable_sleep_mode=True) as llm:

        def ask() -> None:
            found["token ids"].append(tokens_of(llm, BATCH))
            accepted = counter(llm, "spec_decode_num_accepted_tokens")
            found["accepted tokens"].append(accepted - sum(found["accepted tokens"]))

        ask()
        parameters = runner(llm).model.named_parameters()
        weights = [(name, weight.detach().clone()) for name, weight in parameters]
        for level in (1, 2):
            before = known(llm)
            llm.sleep(level=level)
            llm.wake_up()
            if level == 2:
                with torch.no_grad():
                    runner(llm).reload_weights(iter(weights), is_checkpoint_format=False)
            found["known"].append((before, known(llm)))
            ask()
    return found | {"bytes overwritten": [*Overwriting.num_bytes]}


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: one without drafts, and those that sleep."""
    with engine(**LLM_ARGUMENTS) as llm:
        result: dict[str, Any] = {"plain": tokens_of(llm, BATCH)}
    ouroboros = {**OUROBOROS, "max_forwards": FORWARDS, **SIZES}
    sharing = ouroboros | {"model": gemma4(folder / "gemma4")}
    with pytest.raises(NotImplementedError) as error, engine(sharing, **LLM_ARGUMENTS):
        pass
    sleep_as_on_a_gpu()
    longest = LLM_ARGUMENTS["max_model_len"]
    draft = with_windows(folder / "draft", longest, "ss", source=MODEL)
    result |= {"refused": str(error.value), "trees": serve({**GROWN, "row_cost": None})}
    return result | {"ouroboros": serve(ouroboros | {"model": draft})}
