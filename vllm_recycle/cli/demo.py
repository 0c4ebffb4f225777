"""`vllm-recycle demo`: the same prompts through vLLM without and with Token Recycling.

    vllm-recycle demo
    vllm-recycle demo --model DIR --prompts FILE --num-prompts 4

Greedy, one prompt at a time, in float32: there the two outputs have to be equal token for token,
and the command fails where they are not. By default it runs the embedded pair of the repository.
It shows what the method does; `vllm-recycle bench` measures, and lends its driver and worker.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import vllm_recycle
from vllm_recycle.cli import UsageError
from vllm_recycle.cli.bench import driver
from vllm_recycle.cli.bench.arguments import positive, read_prompts
from vllm_recycle.cli.bench.methods import METHODS
from vllm_recycle.cli.bench.plan import Plan

EXAMPLES = Path(vllm_recycle.__file__).parents[1] / "examples"
MODEL = Path("models/target")
PROMPTS = (Path("prompts/gsm8k.jsonl"), Path("prompts/humaneval.jsonl"))
PLAIN, RECYCLING = "none", "token_recycling"
TITLES = {PLAIN: "plain decoding", RECYCLING: "token recycling"}
NUM_PROMPTS = 8
WARM_UP_TOKENS = 16
SHOWN_PROMPTS, SHOWN_LINES, SHOWN_COLUMNS = 3, 4, 96
DISTURBED = 0.05  # share of the CPUs that others used, above which the demo says so


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `demo` to the command."""
    parser = subparsers.add_parser(
        "demo", help="the same prompts without and with token recycling, side by side"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help=f"default: the repository's examples/{MODEL}"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON lines with `prompt` or `turns`; default: the repository's "
        + " and ".join(path.name for path in PROMPTS),
    )
    parser.add_argument("--num-prompts", type=positive, help=f"default: {NUM_PROMPTS}, or all")
    parser.add_argument("--max-tokens", type=positive, default=128, help="default: %(default)s")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Generate twice, show the text, compare. The status is 1 where outputs differ."""
    plan = make_plan(args)
    print(
        f"{plan.model}, {len(plan.prompts)} prompts, {plan.max_tokens} new tokens at most; greedy, "
        "one prompt at a time,\nfloat32, in which the outputs can be compared token for token",
        flush=True,
    )
    replies = generate(plan)
    print("\n".join(["", *format_texts(plan, replies)]))
    differing = [
        number
        for number, (ours, theirs) in enumerate(
            zip(replies[RECYCLING]["outputs"], replies[PLAIN]["outputs"], strict=True), start=1
        )
        if ours != theirs
    ]
    print("\n".join(format_table(replies, identical=not differing)))
    if differing:
        print(f"outputs differ in prompts {', '.join(map(str, differing))}")
    return 1 if differing else 0


def make_plan(args: argparse.Namespace) -> Plan:
    """Find model and prompts, and check them.

    Raises:
        UsageError: for what is missing or cannot be accepted.
    """
    model = args.model or EXAMPLES / MODEL
    files = [args.prompts] if args.prompts else [EXAMPLES / path for path in PROMPTS]
    for option, given, paths in (
        ("--model", args.model, [model]),
        ("--prompts", args.prompts, files),
    ):
        for path in paths:
            if given is None and not path.exists():
                raise UsageError(
                    f"no {path}: the embedded model and prompts come with the repository, not "
                    f"with an installed package; name your own with {option}"
                )
    if not (model / "config.json").is_file():
        raise UsageError(f"--model {model}: no config.json there, expected a model directory")
    # Of several files one prompt each in turn.
    mixed = itertools.chain(*itertools.zip_longest(*map(read_prompts, files)))
    prompts = tuple(prompt for prompt in mixed if prompt is not None)
    if args.num_prompts and args.num_prompts > len(prompts):
        raise UsageError(f"--num-prompts is {args.num_prompts}, but there are {len(prompts)}")
    return Plan(
        model=str(model),
        prompts_path=files[0],
        prompts=prompts[: args.num_prompts or NUM_PROMPTS],
        methods={name: METHODS[name] for name in TITLES},
        max_tokens=args.max_tokens,
        dtype="float32",
    )


def generate(plan: Plan) -> dict[str, driver.Reply]:
    """Each method's pass over the prompts, in a process of its own.

    The warm-up is short, so that the adjacency matrix has seen next to nothing of the prompts
    when the timed pass begins.
    """
    arguments = driver.pass_arguments(plan, 1, 0)
    tokens = min(WARM_UP_TOKENS, plan.max_tokens)
    replies: dict[str, driver.Reply] = {}
    with driver.children(plan) as running:
        for name, config in plan.methods.items():
            print(f"starting vLLM: {TITLES[name]} ...", flush=True)
            driver.load(plan, running[name], config)
            running[name].ask("run", **arguments | {"stop": 1, "max_tokens": tokens})
        for name, child in running.items():
            print(f"generating: {TITLES[name]} ...", flush=True)
            replies[name] = child.ask("run", **arguments)
    return replies


def format_texts(plan: Plan, replies: dict[str, driver.Reply]) -> Iterator[str]:
    """The first lines of the first prompts' outputs; both outputs where they differ."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    outputs = {name: reply["outputs"][:SHOWN_PROMPTS] for name, reply in replies.items()}
    for index, prompt in enumerate(plan.prompts[:SHOWN_PROMPTS]):
        yield f"prompt {index + 1}: {_line(' '.join(prompt.split()))}"
        texts = {
            name: tokenizer.decode(tokens[index], skip_special_tokens=True)
            for name, tokens in outputs.items()
        }
        if outputs[PLAIN][index] == outputs[RECYCLING][index]:
            texts = {"both": texts[PLAIN]}
        for name, text in texts.items():
            yield f"  {TITLES.get(name, name)}:"
            lines = [line for line in text.splitlines() if line.strip()]
            yield from (f"  | {_line(line)}" for line in lines[:SHOWN_LINES])
        yield ""


def format_table(replies: dict[str, driver.Reply], *, identical: bool) -> Iterator[str]:
    """The comparison, and what its columns mean."""
    head = ("", "tokens/s", "speed-up", "accepted", "steps", "outputs identical")
    speeds = {name: reply["tokens"] / reply["wall_s"] for name, reply in replies.items()}
    rows: list[Sequence[str]] = [head]
    for name, reply in replies.items():
        steps = reply["steps"]
        rows.append(
            (
                TITLES[name],
                f"{speeds[name]:.1f}",
                f"{speeds[name] / speeds[PLAIN]:.2f}",
                f"{1 + reply['accepted_tokens'] / steps:.2f}" if steps else "-",
                str(steps),
                "" if name == PLAIN else "yes" if identical else "NO",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()
    yield "accepted: mean number of tokens that a step gives; the timed pass is the first one over"
    yield f"the prompts, after a warm-up of {WARM_UP_TOKENS} tokens"
    others_share = max(reply["others_cpu_share"] for reply in replies.values())
    if others_share > DISTURBED:
        yield f"disturbed: other processes used up to {others_share:.0%} of the CPUs meanwhile"


def _line(text: str) -> str:
    return text if len(text) <= SHOWN_COLUMNS else text[: SHOWN_COLUMNS - 3] + "..."
