"""The proposer of an engine, made from its configuration, and its life within a worker.

A drafter holds the proposer; the runner (`cpu.runner`, `cuda.runner`) asks it for drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_recycle.core import AnyProposer, Operations, TokenRecyclingProposer
from vllm_recycle.integration.engine_config import get_options
from vllm_recycle.integration.learnt_state import LearntState, fingerprint, make_matrix, rank_file
from vllm_recycle.integration.options import TokenRecyclingOptions

logger = init_logger("vllm.recycle")
T = TypeVar("T")


class Drafter(ABC):
    """Holds a proposer, and brings what it learns in and out of a file.

    Attributes:
        vllm_config: of the engine, as `engine_config.rewrite` left it.
        proposer: what drafts.
        state: what it learns.
        is_ready: whether `reset` was called.

    """

    vllm_config: Any
    proposer: AnyProposer
    state: LearntState
    is_ready = False

    @property
    def state_file(self) -> str | None:
        """Where what is learnt lives between engines, if anywhere; its own for each replica."""
        path = get_options(self.vllm_config).state_file
        return path and rank_file(path, self.vllm_config.parallel_config.data_parallel_index)

    def reset(self) -> None:
        """Forget everything, and start from the state file where there is one.

        Raises:
            ValueError: the file is not of this model, tokenizer and sizes.

        """
        state = self.state
        state.clear()
        if self.state_file is not None:
            # A data-parallel rank that has no file yet starts from that of the first.
            files = (self.state_file, get_options(self.vllm_config).state_file)
            known = [file for file in files if file and Path(file).exists()]
            parallel = self.vllm_config.parallel_config.tensor_parallel_size > 1
            is_first = not parallel or get_tp_group().rank_in_group == 0
            if is_first and known:
                state.load(known[0], fingerprint=fingerprint(self.vllm_config.model_config))
            if parallel:
                # Ranks must agree, and may see different files, or one that is being replaced.
                for tensor in state.tensors:
                    get_tp_group().broadcast(tensor)
        self.is_ready = True

    def save(self) -> str | None:
        """Write the state file; returns its path, None where there is none.

        Raises:
            StateFileError: it cannot be written.

        """
        path = self.state_file
        if path is not None:
            self.state.save(path, fingerprint=fingerprint(self.vllm_config.model_config))
            logger.info("vllm_recycle: wrote %s", path)
        return path

    @abstractmethod
    def describe(self) -> str:
        """One line: what is on."""

    def statistics(self) -> dict[str, int]:
        """See `TreeWorker.draft_statistics`."""
        return {"rounds": 0, "forwards": 0}


class TreeDrafter(Drafter):
    """Token Recycling.

    Args:
        vllm_config: of the engine, as `engine_config.rewrite` left it.
        operations: what fills, walks and updates.
        device: where the matrix lives.

    """

    proposer: TokenRecyclingProposer

    def __init__(
        self,
        vllm_config: Any,
        *,
        operations: Operations,
        device: torch.device | str,
    ) -> None:
        self.vllm_config = vllm_config
        options = get_options(vllm_config)
        assert isinstance(options, TokenRecyclingOptions)
        # Here and not with the weights: this is before vLLM measures the memory that is left, and
        # outside what it discards when it sleeps.
        self.state = make_matrix(options, vllm_config, device)
        self.proposer = TokenRecyclingProposer(
            self.state,
            options.load_tree().to(device),
            seed_from_prompt=options.seed_from_prompt,
            operations=operations,
        )

    def describe(self) -> str:
        tree, matrix = self.proposer.tree, self.proposer.matrix
        return (
            f"token_recycling: tree {tree.name}, {tree.num_nodes} nodes, depth {tree.depth}, "
            f"k {matrix.k}, scope {matrix.scope}, hot start {matrix.layout.reads_shared}, "
            f"{matrix.num_written} of {matrix.vocab_size} rows known, {matrix.num_bytes:,} bytes, "
            f"kernels in {self.proposer.operations.name}"
        )


def from_first_rank(value: T) -> T:
    """What the first of the tensor-parallel ranks has, which must all do and draft alike."""
    group = get_tp_group()
    return group.broadcast_object(value) if group.world_size > 1 else value
