"""What a benchmark run measures."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_recycle.cli import UsageError
from vllm_recycle.cli.bench.arguments import check_model, check_vocabularies, json_object
from vllm_recycle.cli.bench.methods import HINTS, SpeculativeConfig, choose_methods
from vllm_recycle.cli.bench.prompts import Prompt, has_chat_template, read_prompts
from vllm_recycle.core.state_file import check_place

NO_CONDITIONS = {"prompts", "prompts_path", "by_category", "json_path"}


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of the benchmark.

    Attributes:
        model, prompts, methods, dtype, max_tokens, ignore_eos, temperature, engine_args: what
            engines run.
        prompts_path: where the prompts are from.
        chat: whether they are put into the model's chat template.
        concurrency: requests in flight, each of these numbers in turn.
        repeats: timed passes per method and number.
        fresh_prompts: whether each pass has prompts of its own; else all have all.
        max_engines: alive at once, None for all.
        by_category: whether to report each category of the prompts too.
        json_path: the report to write.
    """

    model: str
    prompts_path: Path
    prompts: tuple[Prompt, ...]
    methods: Mapping[str, SpeculativeConfig]
    concurrency: tuple[int, ...] = (1,)
    chat: bool = False
    repeats: int = 1
    fresh_prompts: bool = False
    max_tokens: int = 128
    ignore_eos: bool = False
    temperature: float = 0.0
    dtype: str = "auto"
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    max_engines: int | None = None
    by_category: bool = False
    json_path: Path | None = None

    def __post_init__(self) -> None:
        if self.fresh_prompts and len(self.prompts) < self.num_passes:
            raise UsageError(
                f"got {len(self.prompts)} prompts, expected at least {self.num_passes}: each of "
                "the repeats and the first pass needs prompts of its own"
            )
        if HINTS in self.methods and not any(prompt.hint for prompt in self.prompts):
            raise UsageError(f"the method {HINTS}: {self.prompts_path} has no line with a `hint`")
        if self.by_category and not all(prompt.category for prompt in self.prompts):
            raise UsageError(
                f"--by-category: {self.prompts_path} has prompts without a category, expected "
                "`category` in every line"
            )

    def conditions(self) -> dict[str, Any]:
        """The fields that figures depend on, as a report has them; prompts by file and number."""
        fields = dataclasses.asdict(self)
        prompts = {"prompts": str(self.prompts_path), "num_prompts": len(self.prompts)}
        return {key: value for key, value in fields.items() if key not in NO_CONDITIONS} | prompts

    @property
    def first_pass_concurrency(self) -> int:
        return min(self.concurrency)

    def pass_number(self, turn: int, concurrency: int) -> int:
        """The number of a timed pass, of the turn-th repeat at one of the concurrencies."""
        return 1 + turn * len(self.concurrency) + self.concurrency.index(concurrency)

    @property
    def num_passes(self) -> int:
        """The first one and all repeats."""
        return 1 + self.repeats * len(self.concurrency)

    def prompts_of(self, number: int) -> tuple[int, int]:
        """The first prompt of a pass, and the one behind its last; the first pass is number 0."""
        count = len(self.prompts)
        if not self.fresh_prompts:
            return 0, count
        size, rest = divmod(count, self.num_passes)
        start, stop = (place * size + min(place, rest) for place in (number, number + 1))
        return start, stop

    def deal_prompts(self) -> Plan:
        """The same plan; if prompts are fresh, each pass has its share of every category."""
        if not self.fresh_prompts:
            return self
        places = range(len(self.prompts))
        ordered = sorted(places, key=lambda place: str(self.prompts[place].category))
        hands = (sorted(ordered[n :: self.num_passes]) for n in range(self.num_passes))
        prompts = (self.prompts[place] for place in itertools.chain.from_iterable(hands))
        return dataclasses.replace(self, prompts=tuple(prompts))


def make_plan(args: argparse.Namespace) -> Plan:
    """Check the parsed arguments; raises UsageError for anything that cannot be accepted."""
    check_model(args.model, "--model")
    if args.draft_model is not None:
        check_model(args.draft_model, "--draft-model")
        check_vocabularies(args.model, args.draft_model)
    prompts = read_prompts(args.prompts_path, chat=args.chat)
    engine_args = json_object(args.engine_args, "--engine-args")
    if args.chat and not has_chat_template(args.model, engine_args):
        raise UsageError(
            f"--chat: the tokenizer of {args.model} has no chat template, expected a chat model; "
            "leave out --chat for a model that continues texts"
        )
    if args.num_prompts and args.num_prompts > len(prompts):
        raise UsageError(
            f"--num-prompts is {args.num_prompts}, but {args.prompts_path} has {len(prompts)} "
            "prompts"
        )
    if args.json_path is not None:
        try:
            check_place(args.json_path, kind="--json")
        except ValueError as error:
            raise UsageError(str(error)) from None
    names = {field.name for field in dataclasses.fields(Plan)}
    values = {name: value for name, value in vars(args).items() if name in names}
    values |= {"prompts": prompts[: args.num_prompts], "engine_args": engine_args}
    return Plan(**values | {"methods": choose_methods(args)}).deal_prompts()
