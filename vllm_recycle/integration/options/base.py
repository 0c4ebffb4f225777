"""What the options of our methods share, and how values are checked."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeGuard

from vllm_recycle.core.curve import CHAINS, TREES
from vllm_recycle.core.state_file import check_place, shorten
from vllm_recycle.core.tree import TreeTemplate

OUROBOROS = "ouroboros"
# Keys of vLLM's.
LENGTH, TABLE = "num_speculative_tokens", "num_speculative_tokens_per_batch_size"
MODEL_KEYS = ("model", "draft_tensor_parallel_size", "revision", "code_revision")
DRAFT_MODEL_KEYS = (*MODEL_KEYS, "quantization")
DRAFT_MODEL = "draft_model"  # its method
# Keys of both methods.
SHARED_KEYS = ("budget_share", "row_cost", "save_every")
# Seconds between saves of what is learnt: the default, and the bounds of other values.
SAVE_EVERY, MIN_SECONDS, MAX_SECONDS = 300.0, 0.01, 1_000_000
# What drafts: the matrix, along the trunk of a method of vLLM's or of a draft model of our own; or
# this model by phrases, as published.
MATRIX, HOSTED_TRUNK, OWN_TRUNK, PHRASES = "matrix", "hosted trunk", "own trunk", "phrases"


@dataclass(frozen=True, kw_only=True)
class SharedOptions(ABC):
    """What the options of our methods share.

    Attributes:
        method: its name.
        state_key: the key that names the file of what is learnt.
        takes_texts: whether hints, and texts for all, are taken in.
        keeps_places: whether a node is what its place in a draft says.
        scope: who reads and writes what.
        state_file: where what is learnt lives between engines, if anywhere: a file, or a folder.
        trunk: a speculative configuration of vLLM's, whose method drafts the trunk; None for none.
        budget_share: most of a step's token budget that draft tokens may take, in (0, 1].
        row_cost: what a row of a step costs, in units of a step of one row; None to measure.
        save_every: seconds between saves of what is learnt to its file, where anything was learnt;
            0 to save at shutdown and on request alone.
    """

    state_key: ClassVar[str]
    takes_texts: ClassVar[bool]
    keeps_places: ClassVar[bool]

    method: str
    scope: str
    state_file: str | None = None
    trunk: Mapping[str, Any] | None = None
    budget_share: float = 0.5
    row_cost: float | None = None
    save_every: float = SAVE_EVERY

    @classmethod
    def parse(cls, config: Mapping[str, Any], *, on_gpu: bool) -> Self:
        """Check the keys and values of a speculative configuration.

        A key that is null is not given. What is not given is what is best on a GPU, or on a CPU.
        Raises ValueError naming the key, what was given and what is accepted.
        """
        method = config["method"]
        accepted = ["method", *cls.keys(method)]
        for key in config:
            if key not in accepted:
                raise ValueError(
                    f"speculative_config of {method}: unknown key {shorten(key)}, expected any of "
                    f"{accepted}"
                )
        values = {key: value for key, value in config.items() if value is not None}
        if on_gpu and "row_cost" in values:
            raise NotImplementedError(
                f"speculative_config: row_cost is {values['row_cost']!r}, expected none on a GPU, "
                "where steps are timed at each start, or sizes follow from the batch alone"
            )
        if method == OUROBOROS:
            if "model" not in values:
                raise ValueError(f"speculative_config of {method}: 'model' is missing")
            model = {key: values.pop(key) for key in DRAFT_MODEL_KEYS if key in values}
            is_name = isinstance(model["model"], str)
            expect("model", model["model"], is_name, "a draft model's name or path")
            values["trunk"] = {"method": DRAFT_MODEL, **model}
        if (path := values.pop(cls.state_key, None)) is not None:
            # Not by pathlib, which takes away a / at the end.
            values["state_file"] = os.path.expanduser(path) if isinstance(path, str) else path  # noqa: PTH111
        options = cls(**cls._field_values(values, on_gpu=on_gpu))
        options.check()
        is_used = "save_every" not in values or options.state_file is not None
        expected = "none without a file for what is learnt"
        expect("save_every", options.save_every, is_used, expected)
        return options

    @classmethod
    @abstractmethod
    def keys(cls, method: str) -> tuple[str, ...]:
        """What a user may give beside `method`, without vLLM's table."""

    @classmethod
    @abstractmethod
    def _field_values(cls, values: dict[str, Any], *, on_gpu: bool) -> dict[str, Any]:
        """The fields that these values mean, with the defaults of a device."""

    def check(self) -> None:
        """Raise ValueError for the first value that is not accepted."""
        share = self.budget_share
        is_share = is_number(share) and 0 < share <= 1
        expect("budget_share", share, is_share, "a number above 0, at most 1")
        cost = self.row_cost
        is_cost = is_number(cost) and 0 <= cost < math.inf
        expect("row_cost", cost, cost is None or is_cost, "a number, at least 0")
        key, file = self.state_key, self.state_file
        expect(key, file, file is None or (isinstance(file, str) and file != ""), "a path")
        every = self.save_every
        is_time = is_number(every) and (every == 0 or MIN_SECONDS <= every <= MAX_SECONDS)
        expected = f"0, or a number of seconds from {MIN_SECONDS} to {MAX_SECONDS:,}"
        expect("save_every", every, is_time, expected)
        if file is not None:
            kind, may_be_read_only = f"speculative_config: {key}", every == 0
            check_place(file, kind=kind, may_be_folder=True, may_be_read_only=may_be_read_only)

    def max_draft_tokens(self, tokens: int) -> int:
        """The most draft tokens of a step that may have so many tokens."""
        return int(self.budget_share * tokens)

    @abstractmethod
    def load_tree(self) -> TreeTemplate:
        """The template that the target verifies."""

    @property
    def source(self) -> str:
        """What drafts, of `MATRIX` and the others."""
        if self.trunk is None:
            return MATRIX
        return OWN_TRUNK if self.has_own_model else HOSTED_TRUNK

    @property
    def has_own_model(self) -> bool:
        """Whether we run a draft model ourselves, which vLLM loads."""
        return self.method == OUROBOROS

    @property
    def is_dynamic(self) -> bool:
        """Whether trees are grown, and there is no template."""
        return False

    @property
    def kinds(self) -> tuple[str, ...]:
        """What its drafts may be, see `curve.TREES`."""
        return (TREES,)

    @property
    def grows(self) -> bool:
        """Whether drafts grow, and with grammars."""
        return self.is_dynamic or CHAINS in self.kinds

    @property
    def has_trees(self) -> bool:
        """Whether its drafts may be other than chains, which vLLM computes as its own."""
        return TREES in self.kinds

    def as_chains(self, longest: int, *, default: int) -> Self:
        """The same in chains of at most so many nodes, or `default` where the user says nothing."""
        return self

    @property
    def isolates(self) -> bool:
        """Whether nothing of a request is seen in the drafts of another but that it is there."""
        return self.scope == "isolated"

    @property
    def has_owners(self) -> bool:
        """Whether requests may meet what others wrote, so that it matters whose they are."""
        return self.takes_texts and not self.isolates

    @property
    def ignores_salts(self) -> str:
        """What all requests share, whatever their cache salts, in words; empty for nothing."""
        return ""

    @property
    def num_nodes(self) -> int:
        """The most nodes that a draft has."""
        return self.load_tree().num_nodes

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """The most nodes of a path through a draft."""

    @property
    def head_length(self) -> int:
        """Rows that a draft forward on a GPU reads before it drafts.

        The root, the longest path through the last draft, and the token behind that.
        """
        return 1 + self.max_depth + 1

    def host_config(self, host: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of the method of vLLM that ours takes the place of.

        That is the trunk's, or else `host`. For vLLM a draft has as many tokens as ours has nodes.
        """
        config = {k: v for k, v in (self.trunk or host).items() if v is not None}
        return config | {LENGTH: self.num_nodes}


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def expect(key: str, value: Any, valid: bool, expected: str) -> None:
    if not valid:
        raise ValueError(f"speculative_config: {key} is {shorten(value)}, expected {expected}")
