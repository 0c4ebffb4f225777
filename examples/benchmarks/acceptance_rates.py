"""The counts that new engines start from, made of matrix files that engines have written.

    python examples/benchmarks/acceptance_rates.py GREEDY.safetensors SAMPLED.safetensors \
        vllm_recycle/core/acceptance.json --source "model, prompts"

Those of greedy requests are from the first file, those of requests that sample from the second.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path

import torch
from safetensors import safe_open


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("matrix_files", nargs=2, metavar="FILE")
    parser.add_argument("output", type=Path)
    parser.add_argument("--source", required=True, help="what the counts were taken of")
    args = parser.parse_args()
    class_counts = []
    for request_class, path in enumerate(args.matrix_files):
        with safe_open(path, "pt") as file:
            class_counts.append(file.get_tensor("acceptance")[request_class])
            contexts = ast.literal_eval(file.metadata()["contexts"])
    counts = torch.stack(class_counts)
    length_counts = counts.round(decimals=2).transpose(0, 1).tolist()
    pairs = zip(contexts, length_counts, strict=True)
    lines = ",\n".join(f'  "{length}": {json.dumps(values)}' for length, values in pairs)
    args.output.write_text(
        f'{{"source": {json.dumps(args.source)}, "contexts": {{\n{lines}\n}}}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    main()
