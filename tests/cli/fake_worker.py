"""Stands in for `vllm_recycle.cli.bench.worker`: replies at once, with made-up figures.

Engines of Ouroboros are faster the nearer they are to one of the sizes that `FAKE_WORKER_BEST`
lists as JSON. Each request is written to the file that `FAKE_WORKER_LOG` names, with the
configuration of the engine.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# In the paper's form the number of forwards follows gamma.
WEIGHTS = {"gamma": 2}
COUNTS = {"tokens": 10, "steps": 5, "draft_tokens": 50, "accepted_tokens": 5, "seconds": 1.0}


def load(request):
    about = {"device": "cpu", "dtype": "float32", "versions": {"vllm": "none"}}
    return request["engine"]["speculative_config"] or {}, about


def run(config, request):
    prompts = request["stop"] - request["start"]
    distance = min(
        sum(WEIGHTS.get(key, 1) * abs(config.get(key, 0) - best) for key, best in sizes.items())
        for sizes in json.loads(os.environ.get("FAKE_WORKER_BEST", "[{}]"))
    )
    return {
        "wall_s": prompts * (1 + distance),
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
            config, reply = load(request)
        else:
            reply = run(config, request)
            if "FAKE_WORKER_LOG" in os.environ:
                with Path(os.environ["FAKE_WORKER_LOG"]).open("a") as log:
                    log.write(json.dumps({**request, "config": config}) + "\n")
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
