"""PyPI's torchvision, which `make vision` installs, beside torch for CPU.

vLLM's code of models that see images imports it. PyPI has it for CUDA alone, whose operators do not
load beside torch for CPU, and then its import fails. Images need none of them: it is enough that
they are declared. Every process that finds it would have to declare them, so it lies elsewhere than
in `.venv`, and not on the path, which processes inherit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path

import torch

NAME, FOLDER = "torchvision", Path(sys.prefix) / "vision"
OPERATORS = torch.library.Library(NAME, "FRAGMENT")  # which are declared while it lives


class Finder(DistributionFinder):
    """Finds it, and nothing else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(FOLDER)]) if name == NAME else None

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        if context is None or context.name != NAME:
            return ()
        there = DistributionFinder.Context(name=NAME, path=[str(FOLDER)])
        return MetadataPathFinder.find_distributions(there)


def add() -> None:
    """Let this process import it, where it is installed; before transformers looks for it."""
    if FOLDER.exists():
        sys.meta_path.append(Finder())
        for name in ("nms", "qnms"):
            OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
