"""What a method learns, made from its options, and what its file must share with the engine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from vllm_recycle.core.adjacency import AdjacencyMatrix, slots_in
from vllm_recycle.core.ouroboros import make_pool
from vllm_recycle.core.saved_state import SavedState
from vllm_recycle.core.state_file import check_place
from vllm_recycle.core.token_recycling import TokenRecyclingState
from vllm_recycle.integration.options import MethodOptions, OuroborosOptions, TokenRecyclingOptions

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def make_token_recycling_state(
    options: TokenRecyclingOptions, vllm_config: Any, device: torch.device | str
) -> TokenRecyclingState:
    """The adjacency matrix and its counts, empty."""
    matrix = AdjacencyMatrix(
        vllm_config.model_config.get_vocab_size(),
        options.k,
        contexts=options.contexts,
        slots=slots_in(options.context_mib, options.k),
        scope=options.scope,  # type: ignore[arg-type]
        max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
        device=device,
    )
    return TokenRecyclingState(matrix)


def describe_state(
    options: MethodOptions, vllm_config: Any, device: torch.device | str = "meta"
) -> SavedState:
    """What an engine will learn into: its sizes, and what its file must be like.

    On the device `meta` it takes no memory.
    """
    if isinstance(options, OuroborosOptions):
        return make_pool(
            options.shape(),
            vllm_config.model_config.get_vocab_size(),
            max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
            is_shared=options.shares_pool,
            device=device,
        )
    assert isinstance(options, TokenRecyclingOptions)
    return make_token_recycling_state(options, vllm_config, device)


def rank_file(path: str, data_parallel_index: int) -> str:
    """Where a data-parallel rank keeps what it learns: the first in the file that is named.

    The others beside it: rank 1 in `NAME.dp1.safetensors` where that is `NAME.safetensors`. In a
    folder each engine has a file of its own anyway.
    """
    if not data_parallel_index or Path(path).is_dir():
        return path
    file = Path(path)
    return str(file.with_name(f"{file.stem}.dp{data_parallel_index}{file.suffix}"))


def check_state_file(options: MethodOptions, vllm_config: Any) -> None:
    """Refuse a state file that no engine of this configuration would read, by its header.

    In a folder such a file is passed over.

    Raises:
        ValueError: it is torn, or not of this model, tokenizer and sizes; or that of a rank could
            not be written.
    """
    ranks = range(vllm_config.parallel_config.data_parallel_size)
    for path in [rank_file(options.state_file, rank) for rank in ranks if options.state_file]:
        check_place(path, kind="state file", may_be_folder=True)
        if Path(path).is_file():
            expected = describe_state(options, vllm_config)
            model = fingerprint(vllm_config.model_config)
            expected.check(path, fingerprint=model, kind=options.state_key)


def fingerprint(model_config: Any) -> str:
    """What a state file must share with the engine: architecture and tokenizer."""
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
