"""The options of the method `ouroboros` as published, and what any with a draft model needs."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_recycle.core.draft_shape import DraftShape
from vllm_recycle.core.state_file import is_int
from vllm_recycle.core.tree import MAX_NODES, TreeTemplate
from vllm_recycle.integration import draft_limits
from vllm_recycle.integration.draft_limits import Schedule
from vllm_recycle.integration.options.base import MethodOptions, expect

OUROBOROS = "ouroboros"
PAPER = "paper"
# The paper's sizes.
SIZES = {"gamma": 12, "window": 20, "guesses": 20, "phrase_length": 7, "branches": 3}
# Draft forwards of a round on a GPU, where ending when all drafts are whole would wait for it.
FORWARDS_ON_GPU = 4
POOL_SCOPES = ("shared", "request")


@dataclass(frozen=True, kw_only=True)
class DraftModelOptions(MethodOptions):
    """What a draft model needs.

    Attributes:
        model: the draft model; it and the four below are vLLM's keys.
        gamma: tokens that the draft model drafts in a round.
    """

    method = OUROBOROS

    model: str
    draft_tensor_parallel_size: int | None = None
    quantization: str | None = None
    revision: str | None = None
    code_revision: str | None = None
    gamma: int

    def check(self) -> None:
        super().check()
        expect("model", self.model, isinstance(self.model, str), "a draft model's name or path")

    @property
    @abstractmethod
    def draft_rows(self) -> int:
        """The most rows of a draft forward of a request, beside what it has to catch up with."""

    def host_config(self) -> dict[str, Any]:
        names = ("model", "draft_tensor_parallel_size", "quantization", "revision", "code_revision")
        values = {name: getattr(self, name) for name in names}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class OuroborosOptions(DraftModelOptions):
    """The options of the method `ouroboros` as published, whose drafts are verified whole.

    Attributes:
        preset: `paper`.
        window: columns of the lookahead window, the paper's W.
        guesses: phrases tried in a draft forward, the paper's G. As many are kept for a token, or
            `branches` if that is more.
        phrase_length: tokens of a phrase with the one that it follows, the paper's L.
        branches: phrases below the end of a draft, the paper's K; 0 for none.
        max_forwards: draft forwards a round, at most gamma; on a GPU no round has fewer.
        harvest_trunk: whether phrases come from what the target verified in the trunk.
        harvest_branches: whether tried phrases are replaced by what the target said.
        scope: whether requests share a pool that lives on (`shared`), or have each their own
            (`request`).
        pool_file: safetensors file of the shared pool; read at start-up where it exists, written
            while serving and at shutdown, of each data-parallel rank its own. Or a folder of such
            files, one of each replica.
    """

    state_key = "pool_file"

    preset: str = PAPER
    row_cost: float | None = 0.0
    window: int
    guesses: int
    phrase_length: int
    branches: int
    max_forwards: int
    harvest_trunk: bool = True
    harvest_branches: bool = True
    scope: str = "shared"
    pool_file: str | None = None

    @classmethod
    def _defaults(cls, config: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
        # Neither gamma nor `max_forwards` is below the other, whichever is given.
        forwards = config.get("max_forwards")
        min_gamma: Any = forwards if is_int(forwards, 1, MAX_NODES) else 1
        sizes: dict[str, Any] = SIZES | {"gamma": max(SIZES["gamma"], min_gamma), "row_cost": 0.0}
        gamma = config.get("gamma") or sizes["gamma"]
        max_forwards = gamma if is_int(gamma, 1, MAX_NODES) else 1
        sizes["max_forwards"] = min(max_forwards, FORWARDS_ON_GPU) if on_gpu else max_forwards
        return sizes

    def check(self) -> None:
        super().check()
        try:
            self.shape()
        except ValueError as error:
            raise ValueError(f"speculative_config: {error}") from None
        expect("row_cost", self.row_cost, self.row_cost == 0, "0 beside preset 'paper'")
        is_valid = is_int(self.max_forwards, 1, self.gamma)
        expect("max_forwards", self.max_forwards, is_valid, f"an integer 1 to gamma, {self.gamma}")
        for name in ("harvest_trunk", "harvest_branches"):
            value = getattr(self, name)
            expect(name, value, isinstance(value, bool), "true or false")
        expect("scope", self.scope, self.scope in POOL_SCOPES, f"one of {list(POOL_SCOPES)}")
        if self.pool_file is not None and not self.shares_pool:
            raise ValueError(
                "speculative_config: pool_file is given with scope 'request', expected scope "
                "'shared': the pools of requests end with them"
            )

    @property
    def shares_pool(self) -> bool:
        return self.scope == "shared"

    def shape(self) -> DraftShape:
        """The sizes of a draft."""
        names = (field.name for field in dataclasses.fields(DraftShape))
        return DraftShape(**{name: getattr(self, name) for name in names})

    def load_tree(self) -> TreeTemplate:
        return self.shape().tree()

    @property
    def draft_rows(self) -> int:
        return self.shape().lookahead().num_nodes + self.phrase_length

    def schedule(self, *, on_gpu: bool, max_num_batched_tokens: int | None) -> Schedule:
        limit = draft_limits.MAX_DRAFT_ROWS_ON_GPU if on_gpu else draft_limits.MAX_DRAFT_ROWS
        rows = min(limit, max_num_batched_tokens or limit)
        # One request is drafted for even where its forwards have more rows.
        batch = max(1, rows // draft_limits.draft_forward_rows(self.shape()))
        max_rows = draft_limits.MAX_TREE_ROWS if on_gpu else draft_limits.UNLIMITED
        return draft_limits.halving_schedule(self.num_nodes, max_rows, max_num_reqs=batch)
