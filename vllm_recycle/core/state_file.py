"""What a proposer has learnt, in a file: tensors and what they must agree with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


def save_tensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], *, facts: Mapping[str, object]
) -> None:
    """Write tensors as safetensors, with the facts that `load_tensors` checks."""
    partial = Path(f"{path}.{os.getpid()}")  # replicas may save at the same time
    metadata = {key: str(value) for key, value in facts.items()}
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, partial, metadata)
    partial.replace(path)


def load_tensors(
    path: str | Path,
    like: Mapping[str, torch.Tensor],
    *,
    facts: Mapping[str, object],
    kind: str,
) -> dict[str, torch.Tensor]:
    """Read tensors, on the CPU, that `save_tensors` wrote.

    Args:
        path: of the file.
        like: by name, what each tensor must have the type and the shape of.
        facts: what the file must have been written with.
        kind: what messages call the file.

    Raises:
        ValueError: no such file, or one of other facts, tensors or shapes.

    """
    tensors = {}
    try:
        with safe_open(str(path), "pt") as file:
            got = file.metadata() or {}
            for key, expected in facts.items():
                if got.get(key) != str(expected):
                    raise ValueError(f"{kind} {path}: {key} is {got.get(key)}, expected {expected}")
            for name, expected_tensor in like.items():
                tensor = tensors[name] = file.get_tensor(name)
                if tensor.dtype != expected_tensor.dtype or tensor.shape != expected_tensor.shape:
                    raise ValueError(
                        f"{kind} {path}: {name} is {tensor.dtype} {list(tensor.shape)}, expected "
                        f"{expected_tensor.dtype} {list(expected_tensor.shape)}"
                    )
    except (OSError, SafetensorError) as error:
        names = " and ".join(name.replace("_", " ") for name in like)
        raise ValueError(f"{kind} {path}: no {names}: {error}") from error
    return tensors


def save_state(
    path: str | Path, name: str, tensor: torch.Tensor, *, facts: Mapping[str, object]
) -> None:
    """Write a tensor of token ids; see `save_tensors`."""
    save_tensors(path, {name: tensor}, facts=facts)


def load_state(
    path: str | Path, name: str, like: torch.Tensor, *, facts: Mapping[str, object], kind: str
) -> torch.Tensor:
    """Read a tensor of token ids, padded with -1; see `load_tensors`.

    Raises:
        ValueError: as there, or it has numbers that are no token ids.

    """
    tensor = load_tensors(path, {name: like}, facts=facts, kind=kind)[name]
    if int(tensor.min()) < -1 or int(tensor.max()) >= int(str(facts["vocab_size"])):
        raise ValueError(f"{kind} {path}: it has numbers that are no token ids")
    return tensor
