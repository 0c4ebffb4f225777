"""What all drafters share. A drafter adapts a method to a runner, and owns what it learns.

Runners (`cpu.runner`, `cuda.runner`) ask a drafter for drafts, and know of no method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group, get_world_group
from vllm.logger import init_logger

from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.saved_state import SavedState
from vllm_recycle.core.state_file import TensorForm
from vllm_recycle.core.state_place import StatePlace
from vllm_recycle.integration.options import MethodOptions, settings_of
from vllm_recycle.integration.options.base import SAVE_EVERY
from vllm_recycle.integration.state.saved_state import StateSaver, fingerprint, rank_file

logger = init_logger("vllm.recycle")
T = TypeVar("T")
STALE_SAVES = 3  # intervals between saves after which a file that was taken in may go


class Drafter(ABC):
    """Adapts a method to a runner, and brings what it learns, its `state`, in and out of a file."""

    state: SavedState
    num_undrafted = 0  # requests that began and get no drafts, by their sampling parameters
    num_rounds = 0  # of a draft model, counted once for each request

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.options: MethodOptions = settings_of(vllm_config).options

    @cached_property
    def form(self) -> TensorForm:
        """Of the state file."""
        return self.state.form(fingerprint(self.vllm_config.model_config), self.options.state_key)

    def reset(self) -> None:
        """Forget everything, and start from the state file where there is one.

        Raises ValueError if the file is not of this model, tokenizer and sizes.
        """
        self.state.clear()
        self.num_undrafted = 0
        if self.options.state_file is not None:
            parallel = self.vllm_config.parallel_config.tensor_parallel_size > 1
            if not parallel or get_tp_group().rank_in_group == 0:
                self._load()
            if parallel:
                # Ranks must agree, and may see different files, or one that is being replaced.
                for tensor in self.state.tensors.values():
                    get_tp_group().broadcast(tensor)

    @property
    def num_forwards(self) -> int:
        """Draft forwards so far, counted once for each request that took part."""
        return 0

    @abstractmethod
    def add_requests(self, requests: Sequence[NewRequest]) -> None:
        """Begin with some requests."""

    def take_in(self, token_ids: Sequence[int], req_state_idx: int | None = None) -> None:
        """Take in a text, as a prompt: of one request, or else for all of them.

        Raises ValueError where the method, or its scope, has no place for it.
        """
        raise ValueError(f"the method {self.options.method} takes in no texts")

    def forget(self, owners: Collection[str | int]) -> int:
        """Remove the own entries of owners, and return how many there were.

        Raises ValueError where the method has no owners.
        """
        raise ValueError(f"the method {self.options.method} has no owners")

    def weights_changed(self) -> None:
        """The target has other weights from now on: what was counted is worth less."""
        logger.debug("vllm_recycle: the model has new weights")

    def make_saver(self) -> StateSaver | None:
        """What writes the state file from now on; None where there is none."""
        options = self.options
        if options.state_file is None:
            return None
        return StateSaver(
            self.state,
            options.make_state(self.vllm_config, "cpu"),
            self._state_place,
            self.form,
            every=options.save_every,
            # Tensor-parallel ranks must all do it in the same step.
            reads_others=self.vllm_config.parallel_config.tensor_parallel_size == 1,
        )

    @cached_property
    def _state_place(self) -> StatePlace:
        parallel = self.vllm_config.parallel_config
        index = parallel.data_parallel_index
        if parallel.distributed_executor_backend == "external_launcher":
            # Its engines may be alone, each in a process of one job.
            index = get_world_group().rank // parallel.tensor_parallel_size
        return self._make_place(data_parallel_index=index)

    def _make_place(self, *, data_parallel_index: int) -> StatePlace:
        """Where a data-parallel rank keeps its state: its file, or the folder of all."""
        options = self.options
        assert options.state_file is not None
        kind = repr((type(self.state).__name__, sorted(self.form.facts.items())))
        return StatePlace(
            rank_file(options.state_file, data_parallel_index),
            name=f"{options.method}-{sha256(kind.encode()).hexdigest()[:16]}",
            stale_after=STALE_SAVES * (options.save_every or SAVE_EVERY),
        )

    def _load(self) -> None:
        """Read the file, or the newest of a folder, and take in the others of it.

        In a folder a file that cannot be read is passed over.
        """
        place, tried, is_first = self._state_place, set[Path](), True
        # A data-parallel rank that has no file yet starts from that of the first.
        origin = place if place.files() else self._make_place(data_parallel_index=0)
        # Replicas that run replace their files meanwhile.
        while paths := [path for path in origin.files() if path not in tried]:
            for path in paths:
                tried.add(path)
                try:
                    tensors = self.state.read(path, self.form)
                except ValueError as error:
                    if not origin.is_folder:
                        raise
                    if path.exists():
                        logger.warning("%s; passed over", error)
                    continue
                if is_first:
                    self.state.replace(tensors)
                else:
                    for _ in self.state.merge(tensors):
                        pass
                is_first = False
                place.note_taken_in(path)
                logger.info("vllm_recycle: read %s", path)

    @abstractmethod
    def describe(self) -> str:
        """One line: what is on."""

    def statistics(self) -> dict[str, float]:
        """See `TreeWorker.draft_statistics`."""
        return {
            "rounds": self.num_rounds,
            "forwards": self.num_forwards,
            "table_fill": self.state.share_written,
            "undrafted_requests": self.num_undrafted,
        }


def from_all_ranks(value: T) -> list[T]:
    """What each of the tensor-parallel ranks has."""
    group = get_tp_group()
    values = [value] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def from_first_rank(value: T) -> T:
    """What the first of the tensor-parallel ranks has, which must all do and draft alike."""
    return get_tp_group().broadcast_object(value)
