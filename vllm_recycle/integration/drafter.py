"""The proposer of an engine, made from its configuration, and its life within a worker.

vLLM creates a `custom_class` drafter by name, loads it with the model and asks it for drafts;
ours only holds the proposer, since the runner (`v1_runner`, `v2_runner`) does the asking.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_recycle.core import AdjacencyMatrix, TokenRecyclingProposer
from vllm_recycle.integration.engine_config import get_options
from vllm_recycle.kernels.cpu_native import native_operations

logger = init_logger("vllm.recycle")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class TreeDrafter:
    """Holds the proposer, and brings its matrix in and out of a file.

    Args:
        vllm_config: of the engine, as `engine_config.rewrite` left it.

    """

    proposer: TokenRecyclingProposer

    def __init__(self, vllm_config: Any) -> None:
        self.operations = native_operations()
        self.vllm_config = vllm_config
        self.options = get_options(vllm_config)

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Allocate the matrix (before vLLM measures the memory that is left), and load its file.

        Raises:
            ValueError: the file is not of this model, tokenizer and k.

        """
        options, model_config = self.options, self.vllm_config.model_config
        matrix = AdjacencyMatrix(
            model_config.get_vocab_size(),
            options.k,
            scope=options.scope,  # type: ignore[arg-type]
            num_sequences=self.vllm_config.scheduler_config.max_num_seqs,
            hot_start=options.hot_start,
        )
        if options.matrix_file is not None and Path(options.matrix_file).exists():
            matrix.load(options.matrix_file, fingerprint=fingerprint(model_config))
        self.proposer = TokenRecyclingProposer(
            matrix,
            options.load_tree(),
            seed_from_prompt=options.seed_from_prompt,
            operations=self.operations,
        )

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
