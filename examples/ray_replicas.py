"""What `ray_batch.py` and `ray_serve.py` share: how replicas run, and what they have counted.

Ray collects vLLM's metrics from its workers, and has those of a node at a Prometheus endpoint.
"""

from __future__ import annotations

import argparse
import os
import time
import urllib.request
from collections import Counter
from pathlib import Path

import ray
from prometheus_client.parser import text_string_to_metric_families

EXAMPLES = Path(__file__).resolve().parent
REPORT_SECONDS = 1  # between reports of a worker's metrics; Ray takes no less
PATIENCE_SECONDS = 60
PREFIX = "ray_vllm_"


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=str(EXAMPLES / "models/target"))
    parser.add_argument("--draft-model", help="draft with this model, by Ouroboros")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--state", type=Path, help="a folder for what replicas learn")
    return parser


def start_ray(*, num_cpus: int) -> None:
    """Join the cluster that the environment names in RAY_ADDRESS, or start one of this machine."""
    if "RAY_ADDRESS" in os.environ:
        ray.init()
        return
    os.environ.setdefault("RAY_metrics_report_interval_ms", str(1000 * REPORT_SECONDS))
    ray.init(
        "local",
        num_cpus=num_cpus,
        object_store_memory=200 * 2**20,  # it passes texts only
        include_dashboard=False,
        log_to_driver=False,  # what replicas log is in /tmp/ray/session_latest/logs
    )


def engine_kwargs(args: argparse.Namespace) -> dict[str, object]:
    """Arguments of vLLM's engine."""
    method: dict[str, object] = {"method": "token_recycling"}
    if args.draft_model:
        method = {"method": "ouroboros", "model": args.draft_model}
    if args.state:
        args.state.mkdir(parents=True, exist_ok=True)
        # Ray kills replicas that it needs no more: what is learnt is written before.
        method |= {"matrix_file": str(args.state.resolve()), "save_every": 1}
    return {
        "speculative_config": method,
        "dtype": args.dtype,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 2**30,  # by default most of the memory
        "enforce_eager": True,  # starts in seconds; leave it out where it runs longer
    }


def on_cpu(replicas: int) -> dict[str, object]:
    """What tells Ray that a replica needs no GPU: it has a CPU, and its share of the threads."""
    threads = max(1, (os.cpu_count() or 1) // replicas)
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    return {
        "placement_group_config": {"bundles": [{"CPU": 1}]},
        "runtime_env": {"env_vars": environment},
    }


def print_table(num_tokens: int, rate: float) -> None:
    """Print what all engines have done, once Ray has heard of so many tokens.

    Args:
        num_tokens: of the answers.
        rate: tokens a second.

    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while read_metrics()["generation_tokens_total"] < num_tokens and time.monotonic() < deadline:
        time.sleep(REPORT_SECONDS)
    time.sleep(REPORT_SECONDS)  # a report arrives metric by metric
    metrics = read_metrics()
    tokens, calls = metrics["generation_tokens_total"], metrics["inter_token_latency_seconds_count"]
    # The first token of a request is of its prompt; those of a call come together.
    decoded = tokens - metrics["time_to_first_token_seconds_count"]
    print(f"{'tokens':>10}{'tokens/s':>12}{'target calls':>16}{'tokens a call':>16}")
    print(f"{tokens:>10.0f}{rate:>12.1f}{calls:>16.0f}{decoded / max(1, calls):>16.2f}")


def read_metrics() -> Counter[str]:
    """Counters, and counts of histograms, summed over all engines that the nodes have had."""
    metrics: Counter[str] = Counter()
    for node in filter(lambda node: node["Alive"], ray.nodes()):
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        for sample in (sample for family in families for sample in family.samples):
            if sample.name.startswith(PREFIX):
                metrics[sample.name.removeprefix(PREFIX)] += sample.value
    return metrics
