"""What each component of Ouroboros gives, as in Table 4 of its paper, by `vllm-recycle bench`.

    python examples/benchmarks/ouroboros_ablation.py --model examples/models/target \
        --draft-model examples/models/draft --prompts examples/prompts/humaneval.jsonl

`draft_model` drafts as many tokens as Ouroboros. Each `with-` line adds a component to the line
before it, up to the whole method; each `without-` line lacks one component of the whole. All other
arguments go to `vllm-recycle bench`. Each pass has prompts of its own, since a method that reuses
history would recite prompts that it has seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from vllm_recycle.cli import main as vllm_recycle
from vllm_recycle.integration.options import PAPER, OuroborosOptions

NO_PHRASES = {"guesses": 0}  # the window goes on to fill the pool
NO_LENGTHENING = {"branches": 0}
NO_VERIFICATION = {"harvest_trunk": False, "harvest_branches": False}
NO_HISTORY = {"scope": "request"}
# What each line switches off.
LINES: dict[str, dict[str, Any]] = {
    "with-phrases": NO_LENGTHENING | NO_VERIFICATION | NO_HISTORY,
    "with-lengthening": NO_VERIFICATION | NO_HISTORY,
    "with-verification": NO_HISTORY,
    "with-history": {},
    "without-phrases": NO_PHRASES,
    "without-lengthening": NO_LENGTHENING,
    "without-trunk-harvest": {"harvest_trunk": False},
    "without-branch-harvest": {"harvest_branches": False},
}


def arguments(draft_model: str, gamma: int) -> list[str]:
    """The methods of the ablation, as arguments of `vllm-recycle bench`."""
    given = [f"--draft-model={draft_model}", f"--draft-tokens={gamma}", "--fresh-prompts"]
    given += [f"--methods={','.join(['none', 'draft_model', *LINES])}"]
    for name, off in LINES.items():
        config = {
            "method": "ouroboros",
            "model": draft_model,
            "preset": "paper",
            "gamma": gamma,
            **off,
        }
        given += ["--speculative-config", f"{name}={json.dumps(config)}"]
    return given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draft-model", required=True, metavar="DIR")
    parser.add_argument("--gamma", type=int, help="tokens of a draft; default: Ouroboros's own")
    args, others = parser.parse_known_args()
    gamma = args.gamma
    if gamma is None:
        on_gpu = torch.cuda.is_available()
        config = {"method": "ouroboros", "model": args.draft_model, "preset": PAPER}
        gamma = OuroborosOptions.parse(config, on_gpu=on_gpu).gamma
    sys.exit(vllm_recycle(["bench", *arguments(args.draft_model, gamma), *others]))


if __name__ == "__main__":
    main()
