"""Give SmolLM2-135M-Instruct the shape of Llama-3-8B: the same texts at the cost of 8B parameters.

    python examples/models/derive_wide.py --output FOLDER        # 15 GB of disk

The weights of the model fill a part of larger matrices. The rest is zero where it would change the
output, else random. So the outputs are the model's, but for a rounding of scales. The vocabulary
stays: a step reads 4 % fewer parameters than one of Llama-3-8B.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from derive_pair import HERE, Weights, deepened, write_config
from safetensors.torch import load_file, save_file


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama, by their names in its config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


LLAMA_3_8B = Shape(4096, 14336, 32, 32, 8, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    smollm2 = HERE / "smollm2-135m-instruct"
    parser.add_argument("--model", type=Path, default=smollm2, help="a plain Llama, tied")
    parser.add_argument("--output", type=Path, required=True, help="folder of the larger one")
    args = parser.parse_args()
    write(args.model, args.output, LLAMA_3_8B, "cuda" if torch.cuda.is_available() else "cpu")
    print(args.output)


def write(model: Path, folder: Path, shape: Shape, device: str) -> None:
    """A folder with the larger model: a file per layer, one for the rest, tokenizer and config.

    Raises:
        SystemExit: a shape that the model does not fit into.
    """
    config = json.loads((model / "config.json").read_text())
    old = Shape(*(config[name] for name in Shape.__slots__))
    groups = [one.num_attention_heads // one.num_key_value_heads for one in (old, shape)]
    no_less = all(getattr(shape, name) >= getattr(old, name) for name in Shape.__slots__)
    if not no_less or shape.head_dim % old.head_dim or groups[1] < groups[0]:
        raise SystemExit(
            f"got {shape} for {old}: expected no size smaller, heads of a multiple of the size, "
            "and no fewer query heads to a key head"
        )
    # The norm divides by the mean over more elements, all but the first of which are zero.
    epsilon = config["rms_norm_eps"] * old.hidden_size / shape.hidden_size
    untied = {"tie_word_embeddings": False, "rms_norm_eps": epsilon}
    write_config(model, folder, **asdict(shape), **untied)
    files: dict[str, str] = {}
    weights = load_file(model / "model.safetensors", device=device)
    for number, part in enumerate(widen(weights, old, shape)):
        name = f"model-{number:03}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")


def widen(weights: Weights, old: Shape, new: Shape) -> Iterator[Weights]:
    """The weights of the larger model: of each layer, and then the rest."""
    torch.manual_seed(0)
    weights = deepened(weights, old.num_hidden_layers, new.num_hidden_layers)
    for layer in range(new.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        part = layer_of(weights, prefix, old, new)
        yield {prefix + name: weight for name, weight in part.items()}
    embedding = weights["model.embed_tokens.weight"]
    yield {
        "model.embed_tokens.weight": place(embedding, (len(embedding), new.hidden_size), fill=0.0),
        "lm_head.weight": place(embedding, (len(embedding), new.hidden_size)),
        "model.norm.weight": norm(weights["model.norm.weight"], new),
    }


def layer_of(weights: Weights, prefix: str, old: Shape, new: Shape) -> Weights:
    """One layer's weights, by their names in it."""
    part = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
    queries, keys = head_places(old, new), range(old.num_key_value_heads)
    made = {name: norm(weight, new) for name, weight in part.items() if weight.ndim == 1}
    size, hidden, inner = new.head_dim, new.hidden_size, new.intermediate_size
    query_shape = (new.num_attention_heads * size, hidden)
    key_shape = (new.num_key_value_heads * size, hidden)
    # Scores are divided by the root of the head's size.
    query = part["self_attn.q_proj.weight"] * (size / old.head_dim) ** 0.5
    rotated = rotary_places(old.head_dim, size)
    plain = range(old.head_dim)
    made["self_attn.q_proj.weight"] = place(query, query_shape, rows_at(queries, size, rotated))
    # Zeros, so that a query's random elements add nothing to its scores.
    made["self_attn.k_proj.weight"] = place(
        part["self_attn.k_proj.weight"], key_shape, rows_at(keys, size, rotated), fill=0.0
    )
    made["self_attn.v_proj.weight"] = place(
        part["self_attn.v_proj.weight"], key_shape, rows_at(keys, size, plain)
    )
    made["self_attn.o_proj.weight"] = place(
        part["self_attn.o_proj.weight"].T,
        (query_shape[0], hidden),
        rows_at(queries, size, plain),
        fill=0.0,
    ).T.contiguous()
    for name in ("gate_proj", "up_proj"):
        made[f"mlp.{name}.weight"] = place(part[f"mlp.{name}.weight"], (inner, hidden))
    down = place(part["mlp.down_proj.weight"], (hidden, inner), fill=0.0)
    return made | {"mlp.down_proj.weight": down}


def head_places(old: Shape, new: Shape) -> list[int]:
    """Where each query head goes: it stays with its key head."""
    group = old.num_attention_heads // old.num_key_value_heads
    wide = new.num_attention_heads // new.num_key_value_heads
    return [head // group * wide + head % group for head in range(old.num_attention_heads)]


def rotary_places(old: int, new: int) -> list[int]:
    """Where the elements of a head go, so that each is turned by the same angle as before.

    Elements `i` and `i + size / 2` are turned by the position over `theta ** (2i / size)`.
    """
    half = [i * new // old for i in range(old // 2)]
    return [*half, *(new // 2 + i for i in half)]


def rows_at(heads: Sequence[int], size: int, places: Sequence[int]) -> list[int]:
    return [head * size + place for head in heads for place in places]


def place(
    weight: torch.Tensor,
    shape: tuple[int, int],
    rows: list[int] | None = None,
    fill: float | None = None,
) -> torch.Tensor:
    """A matrix with another one in its first columns, in these rows (default: the first ones).

    The rest is random, or `fill`.
    """
    made = weight.new_empty(shape)
    if fill is None:
        made.uniform_(-0.02, 0.02)
    else:
        made.fill_(fill)
    chosen = torch.tensor(rows or range(len(weight)), device=weight.device)
    made[chosen, : weight.shape[1]] = weight
    return made


def norm(weight: torch.Tensor, new: Shape) -> torch.Tensor:
    made = weight.new_ones(new.hidden_size)
    made[: len(weight)] = weight * (len(weight) / new.hidden_size) ** 0.5
    return made


if __name__ == "__main__":
    main()
