"""`rollouts.py` with workers on Ray, which share what they learn by a folder.

    make ray model
    python examples/ray_rollouts.py --model examples/models/smollm2-135m-instruct --workers 2

Each worker is an engine, and answers a part of the questions of each step. The driver trains and
puts the weights into Ray's object store, from which all workers load them. Entries of an owner stay
with its worker, so a question goes to the same worker in every epoch. What all requests share is
written to the folder each second, and the other workers take it in.

On GPUs leave out `on_cpu`, and give each worker `num_gpus=1`.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

import ray
from ray_replicas import on_cpu, start_ray
from rollouts import METHODS, Sampler, Trainer, batches, make_parser, say


def main() -> None:
    parser = make_parser(__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--state", help="a folder that all nodes see; else a temporary one")
    args = parser.parse_args()
    start_ray(num_cpus=args.workers)
    method = METHODS[args.method]
    if args.method == "token_recycling":
        folder = Path(args.state or tempfile.mkdtemp()).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        method = {**METHODS[args.method], "matrix_file": str(folder), "save_every": 1}
    try:
        environment = on_cpu(args.workers)["runtime_env"]
        worker = ray.remote(num_cpus=1, runtime_env=environment)(Sampler)
        workers = [
            worker.remote(args.model, method, args.samples, args.max_tokens)
            for _ in range(args.workers)
        ]
        train(args, Trainer(args), workers)
    finally:
        ray.shutdown()


def train(args, trainer: Trainer, workers: list) -> None:
    """All steps."""
    before = counted(workers)
    for epoch, questions in batches(args):
        started = time.perf_counter()
        parts = [
            [one for one in questions if one[0] % len(workers) == number]
            for number in range(len(workers))
        ]
        busy = [pair for pair in zip(workers, parts, strict=True) if pair[1]]
        answers = ray.get([worker.answers.remote(part, seed=epoch) for worker, part in busy])
        sampled, after = time.perf_counter(), counted(workers)
        reward = trainer.step([group for groups in answers for group in groups])
        weights = ray.put(trainer.weights)
        ray.get([worker.load.remote(weights) for worker in workers])
        say(epoch, reward, after - before, sampled - started, time.perf_counter() - sampled)
        before = after


def counted(workers: list) -> Counter[str]:
    """What all workers have counted."""
    return sum(ray.get([worker.counted.remote() for worker in workers]), Counter())


if __name__ == "__main__":
    main()
