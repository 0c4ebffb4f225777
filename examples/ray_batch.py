"""Batch inference with Ray Data: replicas of an engine with Token Recycling or Ouroboros.

    python examples/ray_batch.py
    python examples/ray_batch.py --draft-model examples/models/draft --format jsonl
    python examples/ray_batch.py --model DIR --prompts FILE.jsonl --output DIR --replicas 4

Needs `ray[data,serve]`, vLLM and this package. Reads prompts from JSONL, shows how far it is,
writes answers as Parquet or JSONL, and prints how many tokens a call of the target gave. With
`--state` each replica writes what it has learnt into that folder, and a new one starts from the
newest.

On CPU as it is. On GPUs leave out `on_cpu` and name them, `accelerator_type="H100"`; with
`tensor_parallel_size` in `engine_kwargs` Ray places the workers of a replica. On several nodes the
package has to be on each, paths have to mean the same on all, and RAY_ADDRESS names the cluster.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray
from ray.data.llm import Processor, build_processor, vLLMEngineProcessorConfig
from ray_replicas import EXAMPLES, engine_kwargs, make_parser, on_cpu, print_table, start_ray

BATCH_SIZE = 8


def main() -> None:
    parser = make_parser(__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=Path, default=EXAMPLES / "prompts/gsm8k.jsonl")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("answers"), help="a folder")
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    args = parser.parse_args()
    if args.output.exists() and any(args.output.iterdir()):
        parser.error(f"--output: {args.output} is not empty")

    start_ray(num_cpus=args.replicas + 1)  # one for reading and writing
    try:
        prompts = ray.data.read_json(str(args.prompts.resolve())).limit(args.num_prompts)
        # Else a small file is one block, and goes to one replica.
        prompts = prompts.repartition(-(-args.num_prompts // BATCH_SIZE))
        answers = make_processor(args)(prompts).materialize()
        write = answers.write_json if args.format == "jsonl" else answers.write_parquet
        write(str(args.output.resolve()))
        rows = answers.take_all()
        num_tokens = sum(row["num_tokens"] for row in rows)
        seconds = max(row["ended"] for row in rows) - min(row["started"] for row in rows)
        print_table(num_tokens, num_tokens / seconds)
        print(f"{len(rows)} answers in {args.output}")
    finally:
        ray.shutdown()


def make_processor(args: argparse.Namespace) -> Processor:
    """From rows with a `prompt` to rows with an `answer`."""
    config = vLLMEngineProcessorConfig(
        model_source=args.model,
        engine_kwargs=engine_kwargs(args),
        concurrency=(args.replicas, args.replicas),
        batch_size=BATCH_SIZE,
        # The engine tokenizes by itself; of these a chat model needs the first.
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        **on_cpu(args.replicas),
    )
    sampling_params = {"temperature": 0, "max_tokens": args.max_tokens}
    return build_processor(
        config,
        preprocess=lambda row: {"prompt": row["prompt"], "sampling_params": sampling_params},
        postprocess=lambda row: {
            "prompt": row["prompt"],
            "answer": row["generated_text"],
            "num_tokens": row["num_generated_tokens"],
            "started": row["metrics"]["arrival_time"],
            "ended": row["metrics"]["arrival_time"] + row["time_taken_llm"],
        },
    )


if __name__ == "__main__":
    main()
