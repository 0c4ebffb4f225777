"""Ray Serve: autoscaled replicas with Token Recycling or Ouroboros behind the OpenAI API.

    python examples/ray_serve.py
    python examples/ray_serve.py --draft-model examples/models/draft
    python examples/ray_serve.py --model DIR --min-replicas 2 --max-replicas 4 --state DIR

Needs `ray[data,serve]`, vLLM and this package. Sends a completion and a streamed chat through the
`openai` package, then as many requests at once as make Ray start all replicas, and ends these. With
`--state` each replica writes what it has learnt into that folder, and a new one starts from the
newest.

On CPU as it is. On GPUs leave out `on_cpu` and name them, `accelerator_type="H100"`; with
`tensor_parallel_size` in `engine_kwargs` Ray places the workers of a replica. On several nodes the
package has to be on each, and paths have to mean the same on all; this script starts a cluster of
its own, so give `make_app` to `serve run` there.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import ray
from openai import OpenAI
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
from ray_replicas import engine_kwargs, make_parser, on_cpu, print_table, start_ray
from server_and_client import CHAT_TEMPLATE, ask

REQUESTS_A_REPLICA = 4
PATIENCE_SECONDS = 300  # for all replicas to run


def main() -> None:
    parser = make_parser(__doc__.partition("\n")[0])
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--max-replicas", type=int, default=2)
    args = parser.parse_args()
    if "RAY_ADDRESS" in os.environ:
        parser.error("RAY_ADDRESS is set, and this would end all that Serve runs there")

    start_ray(num_cpus=args.max_replicas)
    try:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(make_app(args))
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        options = {"model": "target", "max_tokens": args.max_tokens, "temperature": 0}
        ask(client, options)
        num_tokens, rate = load(client, options, replicas=args.max_replicas)
        print(f"replicas: {running_replicas()}")
        print_table(num_tokens, rate)
    finally:
        serve.shutdown()
        ray.shutdown()


def make_app(args: argparse.Namespace) -> serve.Application:
    """The model, autoscaled, and what routes the OpenAI API to it."""
    config = LLMConfig(
        model_loading_config={"model_id": "target", "model_source": args.model},
        engine_kwargs={**engine_kwargs(args), "chat_template": CHAT_TEMPLATE},
        deployment_config={
            "autoscaling_config": {
                "min_replicas": args.min_replicas,
                "max_replicas": args.max_replicas,
                "target_ongoing_requests": REQUESTS_A_REPLICA,
                "upscale_delay_s": 1,
            },
            "ray_actor_options": {"num_cpus": 0},  # beside those of the engine
        },
        **on_cpu(args.max_replicas),
    )
    ingress = {
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 1},
        "ray_actor_options": {"num_cpus": 0},
    }
    return build_openai_app({"llm_configs": [config], "ingress_deployment_config": ingress})


def load(client: OpenAI, options: dict[str, object], *, replicas: int) -> tuple[int, float]:
    """Send twice what the replicas are to have at a time, again and again until all run.

    Returns:
        Tokens of all answers, and tokens a second of the last ones.

    """
    count = 2 * REQUESTS_A_REPLICA * replicas
    prompts = [f"Question: What is {i} times {i + 3}?\nAnswer:" for i in range(count)]
    deadline, total = time.monotonic() + PATIENCE_SECONDS, 0
    with ThreadPoolExecutor(count) as pool:
        while True:
            are_all, begin = running_replicas() >= replicas, time.monotonic()
            answers = pool.map(lambda p: client.completions.create(prompt=p, **options), prompts)
            num_tokens = sum(answer.usage.completion_tokens for answer in answers)
            total += num_tokens
            if are_all or time.monotonic() > deadline:
                return total, num_tokens / (time.monotonic() - begin)


def running_replicas() -> int:
    """Replicas of the model."""
    deployments = serve.status().applications["default"].deployments
    (states,) = (d.replica_states for name, d in deployments.items() if "LLMServer" in name)
    return states.get("RUNNING", 0)


if __name__ == "__main__":
    main()
