"""What speculation would gain on your model and your prompts, and the flag to turn it on.

    python examples/what_would_i_gain.py --model MODEL --prompts PROMPTS.jsonl --chat
    python examples/what_would_i_gain.py --model MODEL --prompts PROMPTS.jsonl --concurrency 1,8

A line of PROMPTS has `prompt` (a string) or `turns` (a list of strings). `vllm-recycle bench` runs
no speculation, vLLM's `ngram` and `suffix`, and Token Recycling, each on prompts that none has seen
before. It needs four prompts at least, and fifty for a firm answer; for N requests in flight some
20 N, since a pass ends with fewer. Further flags are those of `vllm-recycle bench`. Each engine has
1 GiB for its KV cache: a model with a long context needs --engine-args '{"max_model_len": 4096}'.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent


def main() -> None:
    summary = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, allow_abbrev=False)
    parser.add_argument("--model", default=str(EXAMPLES / "models/target"))
    parser.add_argument("--prompts", default=str(EXAMPLES / "prompts/gsm8k.jsonl"))
    parser.add_argument("--methods", help="as for the command, with `none`")
    args, flags = parser.parse_known_args()
    if args.methods:
        flags.append(f"--methods={args.methods}")
        if "none" not in args.methods.split(","):
            parser.error(f"--methods: got {args.methods}, expected `none` among them")
    if any(flag.startswith("--json") for flag in flags):
        parser.error("--json: got one, expected none: this script reads the report")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "vllm_recycle", "bench", "--fresh-prompts"]
        command += ["--model", args.model, "--prompts", args.prompts, "--json", str(path)]
        if status := subprocess.call([*command, *flags]):
            sys.exit(status)
        report = json.loads(path.read_text(encoding="utf-8"))
    for in_flight in report["conditions"]["concurrency"]:
        print(f"\n{in_flight} in flight: {verdict(report, in_flight)}")


def verdict(report: dict[str, Any], in_flight: int) -> str:
    """The fastest method, if it is faster than no speculation in every pass."""
    at_load = [one for one in report["results"] if one["concurrency"] == in_flight]
    [plain] = [one for one in at_load if one["method"] == "none"]
    best = max(at_load, key=lambda one: one["speedup"])
    if best is plain:
        return "no method is faster than plain vLLM. Leave speculation off."
    gain = f"{best['method']} is {best['speedup']:.2f} times as fast as plain vLLM"
    passes = best["speedups"]
    spread = f"{min(passes):.2f} to {max(passes):.2f} over {len(passes)} passes"
    if min(passes) <= 1:
        return f"{gain}, but not in every pass ({spread}). Give more prompts."
    config = json.dumps(report["conditions"]["methods"][best["method"]])
    return f"{gain} ({spread}).\n    --speculative-config '{config}'"


if __name__ == "__main__":
    main()
