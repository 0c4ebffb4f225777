"""The counts that new engines start from, made of a matrix file that an engine has written.

    python examples/benchmarks/acceptance_rates.py MATRIX.safetensors \
        vllm_recycle/core/acceptance.json --source "model, prompts"
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path

from safetensors import safe_open


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("matrix_file")
    parser.add_argument("output", type=Path)
    parser.add_argument("--source", required=True, help="what the counts were taken of")
    args = parser.parse_args()
    with safe_open(args.matrix_file, "pt") as file:
        counts = file.get_tensor("acceptance")
        contexts = ast.literal_eval(file.metadata()["contexts"])
    by_length = counts.round(decimals=2).transpose(0, 1).tolist()
    pairs = zip(contexts, by_length, strict=True)
    lines = ",\n".join(f'  "{length}": {json.dumps(of)}' for length, of in pairs)
    args.output.write_text(
        f'{{"source": {json.dumps(args.source)}, "contexts": {{\n{lines}\n}}}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    main()
