"""What a user may write in `--speculative-config` for our methods, and what it means.

Options travel to every process of an engine in `additional_config`, as plain values.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from vllm_recycle.core.adjacency import SCOPES
from vllm_recycle.core.draft_shape import DraftShape
from vllm_recycle.core.dynamic.context_rows import check_contexts
from vllm_recycle.core.tree import MAX_NODES, TreeTemplate, load_tree
from vllm_recycle.integration.row_budget import (
    MAX_DRAFT_ROWS,
    MAX_TREE_ROWS,
    Schedule,
    draft_forward_rows,
    draft_model_schedule,
    halving_schedule,
)

TOKEN_RECYCLING = "token_recycling"
OUROBOROS = "ouroboros"

# The prefix of the default tree that is fastest on CPU, by the benchmark in the README. With the
# root it makes 16 rows, the height of an AMX tile.
CPU_MAX_NODES = 15
DYNAMIC = "dynamic"
DYNAMIC_MAX_NODES = 80
# Sizes of Ouroboros: on a GPU the paper's, with a fixed number of draft forwards, since ending when
# all drafts are whole would wait for the device; on CPU, where each row is paid for, the fastest in
# the benchmark in the README.
GPU_SIZES = {
    "gamma": 12,
    "window": 20,
    "guesses": 20,
    "phrase_length": 7,
    "branches": 3,
    "early_rows": 0,
    "max_forwards": 4,
}
CPU_SIZES = {
    "gamma": 2,
    "window": 2,
    "guesses": 2,
    "phrase_length": 4,
    "branches": 3,
    "early_rows": 2,
    "max_forwards": 1,
}


@dataclass(frozen=True, kw_only=True)
class MethodOptions(ABC):
    """What the options of our methods share.

    Attributes:
        method: its name.
        budget_share: most of a step's token budget that draft tokens may take, in (0, 1].

    """

    method: ClassVar[str]

    budget_share: float = 0.5

    @classmethod
    def parse(cls, given: Mapping[str, Any], *, on_gpu: bool) -> Self:
        """Check the keys and values of a speculative configuration (without its `method`).

        Args:
            given: the keys and values.
            on_gpu: whether what is not given, or null, is what is best on a GPU, or on a CPU.

        Raises:
            ValueError: naming the key, what was given and what is accepted.

        """
        defaults = cls._defaults(given, on_gpu=on_gpu)
        missing = {key: value for key, value in defaults.items() if given.get(key) is None}
        values = {**given, **missing}
        cls._check_keys(values)
        options = cls(**values)
        options.check()
        return options

    @classmethod
    @abstractmethod
    def _defaults(cls, given: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
        """The keys whose defaults a device decides."""

    @classmethod
    def _check_keys(cls, given: Mapping[str, Any], *others: str) -> None:
        shared = {field.name for field in dataclasses.fields(MethodOptions)}
        fields = sorted(dataclasses.fields(cls), key=lambda field: field.name in shared)
        accepted = [field.name for field in fields]
        for key in given:
            if key not in (*accepted, *others):
                raise ValueError(
                    f"speculative_config of {cls.method}: unknown key {key!r}, expected any "
                    f"of {['method', *accepted, *others]}"
                )
        for field in fields:
            if field.default is dataclasses.MISSING and field.name not in given:
                raise ValueError(f"speculative_config of {cls.method}: {field.name!r} is missing")

    def check(self) -> None:
        """Raise ValueError for the first value that is not accepted."""
        share = self.budget_share
        is_share = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
        _expect("budget_share", share, is_share, "a number above 0, at most 1")

    @abstractmethod
    def load_tree(self) -> TreeTemplate:
        """The template that the target verifies."""

    @property
    def is_dynamic(self) -> bool:
        """Whether trees are grown, and there is no template."""
        return False

    @property
    def num_nodes(self) -> int:
        """The most nodes that a draft has."""
        return self.load_tree().num_nodes

    @abstractmethod
    def host_config(self) -> dict[str, Any]:
        """The keys of vLLM's that its method in whose place ours runs needs."""

    @abstractmethod
    def schedule(self, *, on_gpu: bool, max_num_batched_tokens: int | None) -> Schedule:
        """Nodes of a tree by the size of the batch, where the user gives no table."""


@dataclass(frozen=True, kw_only=True)
class TokenRecyclingOptions(MethodOptions):
    """The options of the method `token_recycling`.

    Attributes:
        k: successors kept for each token.
        tree: `dynamic` for trees that are grown to their worth; or a template that is filled, by
            the name of a shipped one or the path of its file.
        max_nodes: the most nodes of a tree that is grown; of a template, keep only this prefix.
        contexts: lengths of the contexts that rows are kept for, ascending from 1.
        context_mib: MiB of the table of rows of longer contexts.
        row_cost: what a row of a step costs, in units of a step of one row; None to measure.
        scope: who reads and writes what, see `AdjacencyMatrix`.
        hot_start: whether a request inherits what earlier ones left in the matrix.
        matrix_file: safetensors file of the shared matrix; read at start-up where it exists,
            written at shutdown.
        seed_from_prompt: whether the bigrams of the prompt enter the matrix.

    """

    method = TOKEN_RECYCLING

    k: int = 8
    tree: str = DYNAMIC
    max_nodes: int | None = None
    contexts: tuple[int, ...] = (1,)
    context_mib: int = 64
    row_cost: float | None = None
    scope: str = "sequence"
    hot_start: bool = True
    matrix_file: str | None = None
    seed_from_prompt: bool = True

    @classmethod
    def parse(cls, given: Mapping[str, Any], *, on_gpu: bool) -> Self:
        """As for all; `num_speculative_tokens`, vLLM's word, cuts the tree as `max_nodes` does."""
        cls._check_keys(given, "num_speculative_tokens")
        values = dict(given)
        limits = [values.pop(key, None) for key in ("max_nodes", "num_speculative_tokens")]
        for key, limit in zip(("max_nodes", "num_speculative_tokens"), limits, strict=True):
            if limit is not None:
                _expect(key, limit, _is_int(limit, 1, MAX_NODES), f"an integer 1 to {MAX_NODES}")
        if any(limits):
            values["max_nodes"] = min(limit for limit in limits if limit)
        return super().parse(values, on_gpu=on_gpu)

    @classmethod
    def _defaults(cls, given: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
        tree = given.get("tree") or ("default" if on_gpu else DYNAMIC)
        if tree == DYNAMIC:
            if on_gpu:
                raise NotImplementedError(
                    "speculative_config: tree is 'dynamic', expected a template on a GPU"
                )
            return {"tree": tree, "max_nodes": DYNAMIC_MAX_NODES, "contexts": [1, 2, 3, 4]}
        # A list, as any that travels in JSON.
        is_cut = tree == "default" and not on_gpu
        return {"tree": tree, "max_nodes": CPU_MAX_NODES if is_cut else None, "contexts": [1]}

    def check(self) -> None:
        super().check()
        _expect("k", self.k, _is_int(self.k, 1, 64), "an integer 1 to 64")
        _expect("tree", self.tree, isinstance(self.tree, str), "a name or a path")
        _expect("contexts", self.contexts, isinstance(self.contexts, list | tuple), "a list")
        check_contexts(self.contexts)
        is_size = _is_int(self.context_mib, 1, 65536)
        _expect("context_mib", self.context_mib, is_size, "an integer 1 to 65536")
        cost = self.row_cost
        is_cost = isinstance(cost, int | float) and not isinstance(cost, bool) and cost >= 0
        _expect("row_cost", cost, cost is None or is_cost, "a number, at least 0")
        if not self.is_dynamic and (len(self.contexts) > 1 or cost is not None):
            raise ValueError(
                f"speculative_config: contexts {list(self.contexts)} and row_cost {cost} belong to "
                f"the tree 'dynamic', got the tree {self.tree!r}"
            )
        _expect("scope", self.scope, self.scope in SCOPES, f"one of {list(SCOPES)}")
        for name in ("hot_start", "seed_from_prompt"):
            _expect_bool(name, getattr(self, name))
        _expect_file("matrix_file", self.matrix_file)
        if self.scope == "shared" and not self.hot_start:
            raise ValueError(
                "speculative_config: hot_start is false with scope 'shared', expected scope "
                "'sequence' or 'isolated': without them a request has nothing else to draft from"
            )

    @property
    def is_dynamic(self) -> bool:
        return self.tree == DYNAMIC

    @property
    def num_nodes(self) -> int:
        if self.is_dynamic:
            assert self.max_nodes is not None
            return self.max_nodes
        return super().num_nodes

    def load_tree(self) -> TreeTemplate:
        """The template that these options ask for.

        Raises:
            ValueError: no such tree, or one that does not fit k.

        """
        tree = load_tree(self.tree)
        limit = self.max_nodes
        if limit is not None and limit > tree.num_nodes:
            raise ValueError(
                f"max_nodes / num_speculative_tokens: got {limit}, expected at most the "
                f"{tree.num_nodes} nodes of tree {self.tree!r}"
            )
        tree = tree.prefix(tree.num_nodes if limit is None else limit)
        tree.check_ranks(self.k)
        return tree

    def host_config(self) -> dict[str, Any]:
        # Of `custom_class`, on CPU; `ngram_gpu` has no use for it.
        room, name = ("dynamic_drafter", "Dynamic") if self.is_dynamic else ("drafter", "Tree")
        return {"model": f"vllm_recycle.integration.cpu.{room}.{name}V1Drafter"}

    def schedule(self, *, on_gpu: bool, max_num_batched_tokens: int | None) -> Schedule:
        num_nodes = self.num_nodes
        if on_gpu:
            return halving_schedule(num_nodes, MAX_TREE_ROWS)
        # One size for every batch, cut by our scheduler. Said explicitly, since vLLM otherwise
        # pads a request that just came in to a full draft of -1, and keeps it waiting where that
        # does not fit.
        return [(1, 1 << 20, num_nodes)]


POOL_SCOPES = ("shared", "request")
# vLLM's keys that are about the draft model.
DRAFT_MODEL_KEYS = (
    "model",
    "draft_tensor_parallel_size",
    "quantization",
    "revision",
    "code_revision",
)


@dataclass(frozen=True, kw_only=True)
class OuroborosOptions(MethodOptions):
    """The options of the method `ouroboros`.

    Attributes:
        model: the draft model; it and the four below are vLLM's keys.
        draft_tensor_parallel_size: see vLLM.
        quantization: see vLLM.
        revision: see vLLM.
        code_revision: see vLLM.
        gamma: tokens that the draft model drafts in a round.
        window: columns of the lookahead window, the paper's W.
        guesses: phrases kept for a token and tried in a draft forward, the paper's G.
        phrase_length: tokens of a phrase with the one that it follows, the paper's L.
        branches: phrases below the end of a draft, the paper's K; 0 for none.
        early_rows: rows, from the last token on, that have phrases below them as well.
        max_forwards: draft forwards a round, at most gamma; on a GPU no round has fewer.
        harvest_trunk: whether phrases come from what the target verified in the trunk.
        harvest_branches: whether tried phrases are replaced by what the target said.
        scope: whether requests share a pool that lives on (`shared`), or have each their own
            (`request`).
        pool_file: safetensors file of the shared pool; read at start-up where it exists, written
            at shutdown.

    """

    method = OUROBOROS

    model: str
    draft_tensor_parallel_size: int | None = None
    quantization: str | None = None
    revision: str | None = None
    code_revision: str | None = None
    gamma: int
    window: int
    guesses: int
    phrase_length: int
    branches: int
    early_rows: int
    max_forwards: int
    harvest_trunk: bool = True
    harvest_branches: bool = True
    scope: str = "shared"
    pool_file: str | None = None

    @classmethod
    def _defaults(cls, given: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
        sizes = GPU_SIZES if on_gpu else CPU_SIZES
        # Neither of these is above gamma, whichever of them is given.
        limited = ("early_rows", "max_forwards")
        asked: dict[str, int] = {
            key: given[key] for key in ("gamma", *limited) if _is_int(given.get(key), 1, MAX_NODES)
        }
        gamma = asked.get("gamma") or max([sizes["gamma"], *asked.values()])
        return sizes | {"gamma": gamma} | {key: min(sizes[key], gamma) for key in limited}

    def check(self) -> None:
        super().check()
        _expect("model", self.model, isinstance(self.model, str), "a draft model's name or path")
        try:
            self.shape()
        except ValueError as error:
            raise ValueError(f"speculative_config: {error}") from None
        is_valid = _is_int(self.max_forwards, 1, self.gamma)
        _expect("max_forwards", self.max_forwards, is_valid, f"an integer 1 to gamma, {self.gamma}")
        for name in ("harvest_trunk", "harvest_branches"):
            _expect_bool(name, getattr(self, name))
        _expect("scope", self.scope, self.scope in POOL_SCOPES, f"one of {list(POOL_SCOPES)}")
        _expect_file("pool_file", self.pool_file)
        if self.pool_file is not None and self.scope != "shared":
            raise ValueError(
                "speculative_config: pool_file is given with scope 'request', expected scope "
                "'shared': the pools of requests end with them"
            )

    def shape(self) -> DraftShape:
        """The sizes of a draft."""
        names = (field.name for field in dataclasses.fields(DraftShape))
        return DraftShape(**{name: getattr(self, name) for name in names})

    def load_tree(self) -> TreeTemplate:
        return self.shape().tree()

    def host_config(self) -> dict[str, Any]:
        values = {key: getattr(self, key) for key in DRAFT_MODEL_KEYS}
        return {key: value for key, value in values.items() if value is not None}

    def schedule(self, *, on_gpu: bool, max_num_batched_tokens: int | None) -> Schedule:
        return draft_model_schedule(
            self.num_nodes,
            draft_forward_rows(self.shape()),
            min(MAX_DRAFT_ROWS, max_num_batched_tokens or MAX_DRAFT_ROWS),
        )


METHODS: dict[str, type[MethodOptions]] = {
    kind.method: kind for kind in (TokenRecyclingOptions, OuroborosOptions)
}


def _is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _expect(key: str, value: Any, valid: bool, expected: str) -> None:
    if not valid:
        raise ValueError(f"speculative_config: {key} is {value!r}, expected {expected}")


def _expect_bool(key: str, value: Any) -> None:
    _expect(key, value, isinstance(value, bool), "true or false")


def _expect_file(key: str, value: Any) -> None:
    _expect(key, value, value is None or isinstance(value, str), "a path")
    if value is not None:
        path = Path(value)
        usable = path.parent.is_dir() and not path.is_dir()
        _expect(key, value, usable, "a file in a directory that exists")
