"""The options of Ouroboros as published, whose draft model drafts by phrases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_recycle.core.paper.draft_shape import DraftShape
from vllm_recycle.core.paper.phrase_pool import PhrasePool
from vllm_recycle.core.state_file import is_int
from vllm_recycle.core.tree import MAX_NODES, TreeTemplate
from vllm_recycle.integration.options import limits
from vllm_recycle.integration.options.base import (
    DRAFT_MODEL_KEYS,
    OUROBOROS,
    PHRASES,
    SHARED_KEYS,
    SharedOptions,
    expect,
)
from vllm_recycle.integration.options.limits import Schedule

PAPER = "paper"
# The paper's sizes.
SIZES = {"gamma": 12, "window": 20, "guesses": 20, "phrase_length": 7, "branches": 3}
# Draft forwards of a round on a GPU, where ending when all drafts are whole would wait for it.
FORWARDS_ON_GPU = 4
POOL_SCOPES = ("shared", "request")


@dataclass(frozen=True, kw_only=True)
class OuroborosOptions(DraftShape, SharedOptions):
    """The options of the method `ouroboros` as published, whose drafts are verified whole.

    Attributes:
        preset: `paper`.
        gamma: tokens that the draft model drafts in a round.
        window: columns of the lookahead window, the paper's W.
        guesses: phrases tried in a draft forward, the paper's G. As many are kept for a token, or
            `branches` if that is more.
        phrase_length: tokens of a phrase with the one that it follows, the paper's L.
        branches: phrases below the end of a draft, the paper's K; 0 for none.
        max_forwards: draft forwards a round, at most gamma; on a GPU no round has fewer.
        scope: whether requests share a pool that lives on (`shared`), or have each their own
            (`request`).
        state_file: with the shared pool.
    """

    state_key = "pool_file"
    takes_texts, keeps_places = False, True

    method: str = OUROBOROS
    preset: str = PAPER
    row_cost: float | None = 0.0
    scope: str = "shared"

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            raise ValueError(f"speculative_config: {error}") from None

    @classmethod
    def keys(cls, method: str) -> tuple[str, ...]:
        names = ("max_forwards", "harvest_trunk", "harvest_branches", "scope", cls.state_key)
        return (*DRAFT_MODEL_KEYS, "preset", *SIZES, *names, *SHARED_KEYS)

    @classmethod
    def _field_values(cls, values: dict[str, Any], *, on_gpu: bool) -> dict[str, Any]:
        # Neither gamma nor `max_forwards` is below the other, whichever is given.
        forwards = values.get("max_forwards")
        min_gamma: Any = forwards if is_int(forwards, 1, MAX_NODES) else 1
        sizes: dict[str, Any] = SIZES | {"gamma": max(SIZES["gamma"], min_gamma)}
        gamma = values.get("gamma") or sizes["gamma"]
        max_forwards = gamma if is_int(gamma, 1, MAX_NODES) else 1
        sizes["max_forwards"] = min(max_forwards, FORWARDS_ON_GPU) if on_gpu else max_forwards
        return sizes | values

    def check(self) -> None:
        super().check()
        expect("row_cost", self.row_cost, self.row_cost == 0, "0 beside preset 'paper'")
        is_valid = is_int(self.max_forwards, 1, self.gamma)
        expect("max_forwards", self.max_forwards, is_valid, f"an integer 1 to gamma, {self.gamma}")
        for name in ("harvest_trunk", "harvest_branches"):
            value = getattr(self, name)
            expect(name, value, isinstance(value, bool), "true or false")
        expect("scope", self.scope, self.scope in POOL_SCOPES, f"one of {list(POOL_SCOPES)}")
        if self.state_file is not None and not self.shares_pool:
            raise ValueError(
                "speculative_config: pool_file is given with scope 'request', expected scope "
                "'shared': the pools of requests end with them"
            )

    @property
    def source(self) -> str:
        return PHRASES

    @property
    def shares_pool(self) -> bool:
        """Whether all requests have one pool, which lives on."""
        return self.scope == "shared"

    @property
    def ignores_salts(self) -> str:
        shared = "all requests share one pool of phrases, unless the scope is 'request'"
        return shared if self.shares_pool else ""

    @property
    def trunk_length(self) -> int:
        """The most tokens of a trunk, where there is one."""
        return self.gamma

    @property
    def max_depth(self) -> int:
        return self.gamma + self.length

    def load_tree(self) -> TreeTemplate:
        return self.tree()

    def make_state(self, vllm_config: Any, device: torch.device | str) -> PhrasePool:
        """What an engine will learn into, empty. On the device `meta` it takes no memory."""
        num_pools = 1 if self.shares_pool else vllm_config.scheduler_config.max_num_seqs
        vocab_size = vllm_config.model_config.get_vocab_size()
        return self.make_pool(vocab_size * num_pools, device)

    def max_draft_rows(self, table: Schedule, max_num_reqs: int, *, on_gpu: bool) -> int:
        """The most rows of a draft forward of our own, beside what it catches up with on a CPU.

        Raises ValueError if one request has more than a tree may have.
        """
        lookahead = self.lookahead().num_nodes
        if not on_gpu:
            return lookahead + self.phrase_length
        rows = self.head_length + lookahead
        if rows > 1 + MAX_NODES:
            raise ValueError(
                f"speculative_config: a draft forward has {rows} rows of a request, expected at "
                f"most {1 + MAX_NODES}: choose a smaller window or fewer guesses"
            )
        return rows * limits.largest_drafting_batch(table, max_num_reqs)

    def schedule(self, *, on_gpu: bool, max_num_batched_tokens: int | None) -> Schedule:
        """Nodes of a tree by the size of the batch, where the user gives no table."""
        limit = limits.MAX_DRAFT_ROWS_ON_GPU if on_gpu else limits.MAX_DRAFT_ROWS
        rows = min(limit, max_num_batched_tokens or limit)
        # One request is drafted for even where its forwards have more rows.
        batch = max(1, rows // (self.head_length + self.lookahead().num_nodes))
        max_rows = limits.MAX_TREE_ROWS if on_gpu else limits.UNLIMITED
        return limits.halving_schedule(self.num_nodes, max_rows, max_num_reqs=batch)
