"""The proposer of an engine, made from its configuration, and its life within a worker.

vLLM creates a `custom_class` drafter by name, loads it with the model and asks it for drafts;
ours only holds the proposer, since the runner (`v1_runner`, `v2_runner`) does the asking.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_recycle.core import AdjacencyMatrix, Operations, TokenRecyclingProposer
from vllm_recycle.integration.engine_config import get_options
from vllm_recycle.kernels.cpu_native import native_operations

logger = init_logger("vllm.recycle")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class TreeDrafter:
    """Holds the proposer, and brings its matrix in and out of a file.

    Args:
        vllm_config: of the engine, as `engine_config.rewrite` left it.
        operations: what fills, walks and updates; by default for CPU.
        device: where the matrix lives.

    """

    def __init__(
        self,
        vllm_config: Any,
        *,
        operations: Operations | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.vllm_config = vllm_config
        self.options = get_options(vllm_config)
        self.operations = native_operations() if operations is None else operations
        self.is_ready = False
        # Here and not with the weights: this is before vLLM measures the memory that is left, and
        # outside what it discards when it sleeps.
        matrix = AdjacencyMatrix(
            vllm_config.model_config.get_vocab_size(),
            self.options.k,
            scope=self.options.scope,  # type: ignore[arg-type]
            num_sequences=vllm_config.scheduler_config.max_num_seqs,
            hot_start=self.options.hot_start,
            device=device,
        )
        self.proposer = TokenRecyclingProposer(
            matrix,
            self.options.load_tree().to(device),
            seed_from_prompt=self.options.seed_from_prompt,
            operations=self.operations,
        )

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Nothing; vLLM asks it of every drafter."""

    def reset(self) -> None:
        """Forget everything, and start from the matrix file where there is one.

        Raises:
            ValueError: the file is not of this model, tokenizer and k.

        """
        matrix, path = self.proposer.matrix, self.options.matrix_file
        matrix.clear()
        if path is not None:
            parallel = self.vllm_config.parallel_config.tensor_parallel_size > 1
            is_first = not parallel or get_tp_group().rank_in_group == 0
            if is_first and Path(path).exists():
                matrix.load(path, fingerprint=fingerprint(self.vllm_config.model_config))
            if parallel:
                # Ranks must agree, and may see different files, or one that is being replaced.
                get_tp_group().broadcast(matrix.table)
        self.is_ready = True

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("TreeDrafter: expected one of vllm_recycle's own model runners")

    def describe(self) -> str:
        """One line: what is on."""
        tree, matrix = self.proposer.tree, self.proposer.matrix
        return (
            f"token_recycling: tree {tree.name}, {tree.num_nodes} nodes, depth {tree.depth}, "
            f"k {matrix.k}, scope {matrix.scope}, hot start {matrix.layout.reads_shared}, "
            f"{matrix.num_written} of {matrix.vocab_size} rows known, {matrix.num_bytes:,} bytes, "
            f"kernels in {self.operations.name}"
        )

    def save(self) -> str | None:
        """Write the shared matrix to `matrix_file`; returns its path, None where none is set."""
        path = self.options.matrix_file
        if path is not None:
            print_of_model = fingerprint(self.vllm_config.model_config)
            self.proposer.matrix.save(path, fingerprint=print_of_model)
            logger.info("token_recycling: wrote the adjacency matrix to %s", path)
        return path


def fingerprint(model_config: Any) -> str:
    """What a matrix file must share with the engine: architecture and tokenizer."""
    digest = hashlib.sha256()
    hf_config = model_config.hf_text_config
    for part in (
        *(hf_config.architectures or ()),
        hf_config.vocab_size,
        hf_config.hidden_size,
        hf_config.num_hidden_layers,
    ):
        digest.update(f"{part}\n".encode())
    files = [Path(model_config.tokenizer) / name for name in _TOKENIZER_FILES]
    present = [file for file in files if file.is_file()]
    for file in present:
        digest.update(file.read_bytes())
    if not present:
        digest.update(str(model_config.tokenizer).encode())
    return digest.hexdigest()[:32]
