"""`vllm-recycle demo`: a model's answers, streamed by Token Recycling, beside plain decoding.

    vllm-recycle demo
    vllm-recycle demo --model DIR --prompts FILE --num-prompts 4

Greedy, one prompt at a time, in float32: there the two outputs have to be equal token for token,
and the command fails where they are not. The text of the method is shown as it comes; on a
terminal, tokens that one step gave together share a colour. In a checkout it runs by default the
chat model that `make model` fetches, else the embedded target. Driver and worker are those of
`vllm-recycle bench`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import vllm_recycle
from vllm_recycle.cli import UsageError
from vllm_recycle.cli.bench import driver
from vllm_recycle.cli.bench.arguments import check_model, positive
from vllm_recycle.cli.bench.methods import METHODS
from vllm_recycle.cli.bench.plan import Plan
from vllm_recycle.cli.bench.prompts import Prompt, has_chat_template, read_prompts
from vllm_recycle.cli.bench.report import ACCEPTED, per_step
from vllm_recycle.cli.bench.table import MAX_OTHERS_SHARE, align

EXAMPLES = Path(vllm_recycle.__file__).parents[1] / "examples"
CHAT_MODEL = Path("models/smollm2-135m-instruct")
CHAT_PROMPTS = (Path("prompts/spec_bench.jsonl"),)
EMBEDDED_MODEL = Path("models/target")
EMBEDDED_PROMPTS = (Path("prompts/gsm8k.jsonl"), Path("prompts/humaneval.jsonl"))
# Where the repository's are not there; drafts come from the text before them, so two repeat theirs.
PROMPTS_OF_PACKAGE = (
    "Rename the function `area` to `surface` and write down the whole program:\n\n"
    "def area(width, height):\n    return width * height\n\nprint(area(2, 3))\nprint(area(4, 5))",
    "A baker sells 12 loaves a day, at 3 dollars each. What does she earn in a week? Step by step.",
    "List the months of the year, one on each line, with the number of days of each.",
    "Correct the spelling, and repeat the text: The trane to Lyon leeves at nine. The trane to "
    "Paris leeves at ten. Both tranes stop in Dijon.",
    "Explain in three sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
)
PLAIN, RECYCLING = "none", "token_recycling"
TITLES = {PLAIN: "plain decoding", RECYCLING: "token recycling"}
NUM_PROMPTS = 6
SHOWN_COLUMNS = 96
COLOURS = (32, 33, 35, 36)  # steps with several tokens take these in turn
COUNTED = ("tokens", "wall_s", "steps", "accepted_tokens")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `demo` to the command."""
    parser = subparsers.add_parser(
        "demo", help="answers streamed by token recycling, compared with plain decoding"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help=f"default: in a checkout, examples/{CHAT_MODEL}, which `make model` fetches, else "
        f"examples/{EMBEDDED_MODEL}",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="JSON lines with `prompt` or `turns`; default: the repository's, that suit the model, "
        "else six of the package's own",
    )
    parser.add_argument("--num-prompts", type=positive, help=f"default: {NUM_PROMPTS}, or all")
    parser.add_argument("--max-tokens", type=positive, default=64, help="default: %(default)s")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Generate twice, show the text, compare. The status is 1 where outputs differ."""
    plan = make_plan(args)
    print(
        f"{plan.model}, {len(plan.prompts)} prompts, {plan.max_tokens} new tokens at most; greedy, "
        "one prompt at a time,\nnot compiled, float32, where outputs can be compared exactly",
        flush=True,
    )
    replies = generate(plan)
    outputs = ([reply["outputs"] for reply in replies[name]] for name in (PLAIN, RECYCLING))
    pairs = enumerate(zip(*outputs, strict=True), start=1)
    mismatches = [number for number, (plain, recycled) in pairs if plain != recycled]
    print("\n".join(format_table(replies, identical=not mismatches)))
    if mismatches:
        print(f"outputs differ in prompts {', '.join(map(str, mismatches))}")
    return 1 if mismatches else 0


def make_plan(args: argparse.Namespace) -> Plan:
    """Find model and prompts; raises UsageError for what is missing or cannot be accepted."""
    model = args.model or EXAMPLES / CHAT_MODEL
    if not args.model and not (model / "config.json").is_file():
        chat_model, model = model, EXAMPLES / EMBEDDED_MODEL
        if not model.exists():
            raise UsageError(
                "no --model: the embedded models come with the repository, not with an installed "
                "package; expected a model directory"
            )
        print(f"no {chat_model} (`make model` fetches it): the small embedded model instead")
    check_model(str(model), "--model")
    chat = has_chat_template(str(model))
    prompts = _prompts(args.prompts, chat=chat)
    if args.num_prompts and args.num_prompts > len(prompts):
        raise UsageError(f"--num-prompts is {args.num_prompts}, but there are {len(prompts)}")
    return Plan(
        model=str(model),
        prompts_path=args.prompts or EXAMPLES / "prompts",
        prompts=prompts[: args.num_prompts or NUM_PROMPTS],
        chat=chat,
        methods={name: METHODS[name] for name in TITLES},
        max_tokens=args.max_tokens,
        dtype="float32",
        engine_args={"enforce_eager": True},  # to compile takes longer than all answers
    )


def _prompts(prompts_path: Path | None, *, chat: bool) -> tuple[Prompt, ...]:
    """The first turns of the given prompts, or of the repository's, the kinds in turn."""
    if prompts_path:
        return read_prompts(prompts_path)
    kinds: dict[tuple[Path, str | None], list[Prompt]] = {}
    files = [EXAMPLES / name for name in (CHAT_PROMPTS if chat else EMBEDDED_PROMPTS)]
    if not all(path.exists() for path in files):
        return tuple(Prompt((text,)) for text in PROMPTS_OF_PACKAGE)
    for path in files:
        for prompt in read_prompts(path):
            kinds.setdefault((path, prompt.category), []).append(prompt)
    prompts = itertools.chain(*itertools.zip_longest(*kinds.values()))
    return tuple(prompt for prompt in prompts if prompt)


def generate(plan: Plan) -> dict[str, list[driver.Reply]]:
    """What each method gives for each prompt, in a process of its own; the text is shown.

    The warm-up is short, so that the adjacency matrix has seen next to nothing when the first
    prompt is timed.
    """
    replies: dict[str, list[driver.Reply]] = {name: [] for name in plan.methods}
    arguments = driver.pass_arguments(plan, 1, 0)
    with driver.children(plan) as workers:
        for name, config in plan.methods.items():
            print(f"starting vLLM: {TITLES[name]} ...", flush=True)
            driver.load(plan, workers[name], config)
            workers[name].ask("run", **driver.warm_up_arguments(plan, 1))
        for index, prompt in enumerate(plan.prompts):
            arguments |= {"start": index, "stop": index + 1, "stream": True}
            print(f"\n[{index + 1}/{len(plan.prompts)}] {_line(prompt)}\n", flush=True)
            recycled = show(workers[RECYCLING].follow("run", **arguments))
            plain = workers[PLAIN].ask("run", **arguments)
            for name, reply in ((PLAIN, plain), (RECYCLING, recycled)):
                replies[name].append(reply)
                speed = reply["tokens"] / reply["wall_s"]
                print(f"  {TITLES[name]:16}{reply['steps']:4} steps, {speed:6.1f} tokens/s")
    print()
    return replies


def show(replies: Iterable[driver.Reply]) -> driver.Reply:
    """Print the text of a stream as it comes; returns its last reply, what the pass gave."""
    colours, is_terminal = itertools.cycle(COLOURS), sys.stdout.isatty()
    for reply in replies:
        if "event" in reply:
            text = reply["text"]
            if is_terminal and reply["tokens"] > 1:
                text = f"\x1b[{next(colours)}m{text}\x1b[0m"
            print(text, end="", flush=True)
    print("\n")
    return reply


def format_table(replies: dict[str, list[driver.Reply]], *, identical: bool) -> Iterator[str]:
    """The comparison, and what its columns mean."""
    title = max(map(len, TITLES.values()))
    rows = [[" " * title, "tokens/s", "speed-up", "accepted", "steps", "outputs identical"]]
    plain_speed = None
    for name, passes in replies.items():
        total = {key: sum(reply[key] for reply in passes) for key in COUNTED}
        speed, accepted = total["tokens"] / total["wall_s"], per_step(total, ACCEPTED)
        plain_speed = plain_speed or speed
        numbers = [f"{speed:.1f}", f"{speed / plain_speed:.2f}"]
        numbers += ["-" if accepted is None else f"{accepted:.2f}", f"{total['steps']:.0f}"]
        verdict = "" if name == PLAIN else "yes" if identical else "NO"
        rows.append([TITLES[name].ljust(title), *numbers, verdict])
    yield from align(rows)
    yield "accepted: mean number of tokens that a step gives, without the steps that end a prompt;"
    yield "what earlier prompts left is used"
    others_share = max(reply["others_cpu_share"] for passes in replies.values() for reply in passes)
    if others_share > MAX_OTHERS_SHARE:
        yield f"disturbed: other processes used up to {others_share:.0%} of the CPUs meanwhile"


def _line(prompt: Prompt) -> str:
    kind = f"{prompt.category}: " if prompt.category else ""
    text = kind + " ".join(prompt.turns[0].split())
    return text if len(text) <= SHOWN_COLUMNS else text[: SHOWN_COLUMNS - 3] + "..."
