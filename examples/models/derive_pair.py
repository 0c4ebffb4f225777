"""Derive a target and a draft model from SmolLM2-135M-Instruct, without training.

    python examples/models/derive_pair.py --layers 150        # what `make pair` runs

The target is the model with further layers that add nothing: its outputs are the model's to the
bit, while a step costs what one of so many layers costs. The draft model leaves out two layers.
So the texts and what is accepted are real, and the ratio of the costs is set.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
LAYER = re.compile(r"(?<=^model\.layers\.)\d+(?=\.)")
# What a layer adds to its input comes out of these.
OUTPUTS = ("o_proj.weight", "down_proj.weight")
Weights = dict[str, torch.Tensor]


def main(*arguments: str) -> None:
    options = parse(arguments or None)
    weights = load_file(options.model / "model.safetensors")
    count = 1 + max(int(found[0]) for name in weights if (found := LAYER.search(name)))
    if options.layers < count or not set(options.left_out) <= set(range(count)):
        raise SystemExit(
            f"--layers {options.layers} --left-out {options.left_out}: expected at least the "
            f"{count} layers of {options.model}, and some of these"
        )
    kept = [layer for layer in range(count) if layer not in options.left_out]
    for name, made, layers in (
        ("pair-target", deepened(weights, count, options.layers), options.layers),
        ("pair-draft", layers_of(weights, kept), len(kept)),
    ):
        folder = options.output / name
        write_config(options.model, folder, num_hidden_layers=layers)
        save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
        print(f"{folder}: {layers} layers")


def parse(arguments: Iterable[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    smollm2 = HERE / "smollm2-135m-instruct"
    parser.add_argument("--model", type=Path, default=smollm2, help="a plain Llama")
    parser.add_argument("--layers", type=int, default=150, help="of the target")
    parser.add_argument("--left-out", type=int, nargs="+", default=[17, 18], help="by the draft")
    parser.add_argument("--output", type=Path, default=HERE, help="folder for both")
    return parser.parse_args(arguments)


def deepened(weights: Weights, count: int, layers: int) -> Weights:
    """The weights of a model of `count` layers with further layers that add nothing."""
    made = layers_of(weights, [*range(count), *[0] * (layers - count)])
    for name, weight in made.items():
        found = LAYER.search(name)
        if found and int(found[0]) >= count and name.endswith(OUTPUTS):
            made[name] = torch.zeros_like(weight)
    return made


def layers_of(weights: Weights, sources: list[int]) -> Weights:
    """The weights of a model whose layers are those of another, in this order."""
    made = {name: weight for name, weight in weights.items() if not LAYER.search(name)}
    for layer, source in enumerate(sources):
        for name, weight in weights.items():
            found = LAYER.search(name)
            if found and int(found[0]) == source:
                made[LAYER.sub(str(layer), name)] = weight.clone()
    return made


def write_config(model: Path, folder: Path, **changed: Any) -> None:
    """A folder with the tokenizer of a model, and its settings but for some."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in [*model.glob("*.json"), *model.glob("*.jinja")]:
        shutil.copy(file, folder)
    config = json.loads((model / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
