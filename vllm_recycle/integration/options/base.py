"""What the options of our methods share, and how values are checked."""

from __future__ import annotations

import dataclasses
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeGuard

from vllm_recycle.core.curve import CHAINS, TREES
from vllm_recycle.core.state_file import check_place, shorten
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.integration.draft_limits import Schedule

TABLE = "num_speculative_tokens_per_batch_size"  # vLLM's key
# Seconds between saves of what is learnt: the default, and the bounds of other values.
SAVE_EVERY, MIN_SECONDS, MAX_SECONDS = 300.0, 0.01, 1_000_000


@dataclass(frozen=True, kw_only=True)
class MethodOptions(ABC):
    """What the options of our methods share.

    Attributes:
        method: its name.
        state_key: the option that names the file of what is learnt.
        budget_share: most of a step's token budget that draft tokens may take, in (0, 1].
        row_cost: what a row of a step costs, in units of a step of one row; None to measure.
        other_keys: keys of vLLM's that are other words for ours.
        save_every: seconds between saves of what is learnt to its file, where anything was learnt;
            0 to save at shutdown and on request alone, None for the default.
    """

    method: ClassVar[str]
    state_key: ClassVar[str]
    other_keys: ClassVar[tuple[str, ...]] = ()

    budget_share: float = 0.5
    row_cost: float | None = None
    save_every: float | None = None

    @classmethod
    def parse(cls, config: Mapping[str, Any], *, on_gpu: bool) -> Self:
        """Check the keys and values of a speculative configuration (without its `method`).

        A key that is null is not given. What is not given is what is best on a GPU, or on a CPU.
        Raises ValueError naming the key, what was given and what is accepted.
        """
        cls._check_keys(config)
        config = cls._own({key: value for key, value in config.items() if value is not None})
        if on_gpu and "row_cost" in config:
            raise NotImplementedError(
                f"speculative_config: row_cost is {config['row_cost']!r}, expected none on a GPU, "
                "where steps are timed at each start, or sizes follow from the batch alone"
            )
        values = cls._defaults(config, on_gpu=on_gpu) | config
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in values:
                raise ValueError(f"speculative_config of {cls.method}: {field.name!r} is missing")
        options = cls(**values)
        options.check()
        return options

    @classmethod
    @abstractmethod
    def _defaults(cls, config: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
        """The keys whose defaults a device decides."""

    @classmethod
    def _own(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Keys of ours with their values, in the place of `other_keys`."""
        return config

    @classmethod
    def _check_keys(cls, config: Mapping[str, Any]) -> None:
        shared = {field.name for field in dataclasses.fields(MethodOptions)}
        fields = sorted(dataclasses.fields(cls), key=lambda field: field.name in shared)
        accepted = [field.name for field in fields]
        for key in config:
            if key not in (*accepted, *cls.other_keys):
                raise ValueError(
                    f"speculative_config of {cls.method}: unknown key {shorten(key)}, expected any "
                    f"of {['method', *accepted, *cls.other_keys]}"
                )

    def check(self) -> None:
        """Raise ValueError for the first value that is not accepted."""
        share = self.budget_share
        is_share = is_number(share) and 0 < share <= 1
        expect("budget_share", share, is_share, "a number above 0, at most 1")
        cost = self.row_cost
        is_cost = is_number(cost) and 0 <= cost < math.inf
        expect("row_cost", cost, cost is None or is_cost, "a number, at least 0")
        key, file = self.state_key, getattr(self, self.state_key)
        expect(key, file, file is None or (isinstance(file, str) and file != ""), "a path")
        every = self.save_every
        is_time = is_number(every) and (every == 0 or MIN_SECONDS <= every <= MAX_SECONDS)
        expected = f"0, or a number of seconds from {MIN_SECONDS} to {MAX_SECONDS:,}"
        expect("save_every", every, every is None or is_time, expected)
        if self.state_file is not None:
            check_place(
                self.state_file,
                kind=f"speculative_config: {key}",
                may_be_folder=True,
                may_be_read_only=every == 0,
            )
        is_used = every is None or file is not None
        expect("save_every", every, is_used, "none without a file for what is learnt")

    def max_draft_tokens(self, tokens: int) -> int:
        """The most draft tokens of a step that may have so many tokens."""
        return int(self.budget_share * tokens)

    @abstractmethod
    def load_tree(self) -> TreeTemplate:
        """The template that the target verifies."""

    @property
    def state_file(self) -> str | None:
        """Where what is learnt lives between engines, if anywhere: a file, or a folder."""
        path = getattr(self, self.state_key)
        return None if path is None else os.path.expanduser(path)  # noqa: PTH111 - keeps a last /

    @property
    def seconds_between_saves(self) -> float:
        """As given or by default; 0 to save at shutdown and on request alone."""
        return SAVE_EVERY if self.save_every is None else self.save_every

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

    @property
    def isolates(self) -> bool:
        """Whether nothing of a request is seen in the drafts of another but that it is there."""
        return False

    @property
    def num_nodes(self) -> int:
        """The most nodes that a draft has."""
        return self.load_tree().num_nodes

    def host_config(self) -> dict[str, Any]:
        """What the user says of the method of vLLM that ours takes the place of."""
        return {}

    @abstractmethod
    def schedule(self, *, on_gpu: bool, max_num_batched_tokens: int | None) -> Schedule:
        """Nodes of a tree by the size of the batch, where the user gives no table."""


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def expect(key: str, value: Any, valid: bool, expected: str) -> None:
    if not valid:
        raise ValueError(f"speculative_config: {key} is {shorten(value)}, expected {expected}")
