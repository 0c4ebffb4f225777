"""What a method learns, as named tensors that a file can hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from vllm_recycle.core.state_file import TensorForm

MERGED = 2048  # lines at once, so that a step hardly waits for them


class SavedState(ABC):
    """State that lives on in a file between engines.

    Files carry facts, such as sizes and the model. A file is read only where all of them agree.
    """

    @property
    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """All that is learnt, by its name in a file; these tensors are changed in place."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, object]:
        """What a file of this state is written with, beside the model's fingerprint."""

    @property
    @abstractmethod
    def share_written(self) -> float:
        """The part of the places that hold something."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @property
    def places(self) -> dict[str, torch.Tensor]:
        """Where `replace` puts the tensors of a file: `tensors`, or views of them."""
        return self.tensors

    def contents(self) -> dict[str, torch.Tensor]:
        """The tensors that `save` writes, of the types and shapes of `places`."""
        return self.places

    @abstractmethod
    def validate(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError, saying what is wrong, for tensors of a file that cannot be used."""

    def form(self, fingerprint: str, kind: str = "state file") -> TensorForm:
        """What a file of this state is like, for a model; messages call it its `kind`."""
        return TensorForm(self.places, {**self.facts, "fingerprint": fingerprint}, kind)

    def save(self, path: str | Path, form: TensorForm) -> None:
        """Write the state as safetensors, or raise StateFileError."""
        form.save(path, self.contents())

    def read(self, path: str | Path, form: TensorForm) -> dict[str, torch.Tensor]:
        """The tensors of a file, on the CPU; ValueError where it has another form or values."""
        tensors = form.read(path)
        try:
            self.validate(tensors)
        except ValueError as error:
            raise ValueError(f"{form.kind} {path}: {error}") from None
        return tensors

    def replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors of a file in the place of everything that is shared here."""
        for name, place in self.places.items():
            place.copy_(tensors[name])

    def merge(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[bool]:
        """Take in what another engine has learnt, `tensors` of its file; true after each part.

        That is the lines of the first of `places` which `is_better` names; no counts.
        """
        name, place = next(iter(self.places.items()))
        for lines, peer_lines in zip(place.split(MERGED), tensors[name].split(MERGED), strict=True):
            if lines.is_cuda:  # from other memory the copy would wait for all steps so far
                peer_lines = peer_lines.pin_memory().to(lines.device, non_blocking=True)
            lines.copy_(torch.where(self.is_better(peer_lines, lines), peer_lines, lines))
            yield True

    @abstractmethod
    def is_better(self, peer_lines: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
        """Which lines of another engine are to replace `lines`, as bool [lines, 1, ...]."""


def check_token_ids(token_ids: torch.Tensor, vocab_size: int) -> None:
    """Raise ValueError for integers that are neither token ids nor -1."""
    if int(token_ids.min()) < -1 or int(token_ids.max()) >= vocab_size:
        raise ValueError("it has numbers that are no token ids")
