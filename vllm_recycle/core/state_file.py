"""What a proposer has learnt, in a file: one integer tensor and what it must agree with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


def save_state(
    path: str | Path, name: str, tensor: torch.Tensor, *, facts: Mapping[str, object]
) -> None:
    """Write a tensor as safetensors, with the facts that `load_state` checks."""
    partial = Path(f"{path}.{os.getpid()}")  # replicas may save at the same time
    metadata = {key: str(value) for key, value in facts.items()}
    save_file({name: tensor.cpu().contiguous()}, partial, metadata)
    partial.replace(path)


def load_state(
    path: str | Path, name: str, like: torch.Tensor, *, facts: Mapping[str, object], kind: str
) -> torch.Tensor:
    """Read a tensor of token ids, on the CPU, that `save_state` wrote.

    Args:
        path: of the file.
        name: of the tensor.
        like: what the tensor must have the type and the shape of.
        facts: what the file must have been written with; among them `vocab_size`.
        kind: what messages call the file.

    Raises:
        ValueError: no such file, or one of other facts, shape or ids.

    """
    try:
        with safe_open(str(path), "pt") as file:
            got = file.metadata() or {}
            for key, expected in facts.items():
                if got.get(key) != str(expected):
                    raise ValueError(f"{kind} {path}: {key} is {got.get(key)}, expected {expected}")
            tensor = file.get_tensor(name)
        if tensor.dtype != like.dtype or tensor.shape != like.shape:
            raise ValueError(
                f"{kind} {path}: got {tensor.dtype} {list(tensor.shape)}, expected {like.dtype} "
                f"{list(like.shape)}"
            )
        if int(tensor.min()) < -1 or int(tensor.max()) >= int(str(facts["vocab_size"])):
            raise ValueError(f"{kind} {path}: it has numbers that are no token ids")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{kind} {path}: no {name.replace('_', ' ')}: {error}") from error
    return tensor
