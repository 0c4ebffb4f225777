"""Stands in for `vllm_recycle.cli.bench.worker`: replies at once, with made-up figures."""

from __future__ import annotations

import json
import sys

COUNTS = {"tokens": 10, "steps": 5, "draft_tokens": 50, "accepted_tokens": 5, "seconds": 1.0}
ABOUT = {"device": "cpu", "dtype": "float32", "versions": {"vllm": "none"}}


def run(config, request):
    prompts = request["stop"] - request["start"]
    return {
        "wall_s": prompts,
        "requests": prompts,
        "tokens": 10 * prompts,
        "steps": 5 * prompts,
        "engine_steps": 5 * prompts,
        "step_ms": 1.0,
        "draft_tokens": 50 * prompts,
        "accepted_tokens": 5 * prompts,
        "draft_rounds": 5 * prompts if config.get("method") == "ouroboros" else 0,
        "draft_forwards": 15 * prompts,
        "others_cpu_share": 0.0,
        "prompts": [COUNTS] * prompts,
        "outputs": [[1]] * prompts,
    }


def main():
    config = {}
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "load":
            config, reply = request["engine"]["speculative_config"] or {}, ABOUT
        else:
            reply = run(config, request)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
