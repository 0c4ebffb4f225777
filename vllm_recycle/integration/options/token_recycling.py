"""The options of Token Recycling, with or without a trunk that its trees grow along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from vllm_recycle.core.adjacency import MAX_CONTEXT, SCOPES, AdjacencyMatrix, slots_in
from vllm_recycle.core.curve import CHAINS, TREES
from vllm_recycle.core.grow import LEVELS
from vllm_recycle.core.state_file import is_int
from vllm_recycle.core.token_recycling import TokenRecyclingState
from vllm_recycle.core.tree import CHAIN, MAX_CHAIN, MAX_NODES, TreeTemplate, load_tree
from vllm_recycle.core.trunk import CHOICES
from vllm_recycle.integration.options import limits
from vllm_recycle.integration.options.base import (
    DRAFT_MODEL_KEYS,
    LENGTH,
    OUROBOROS,
    SHARED_KEYS,
    SharedOptions,
    expect,
)
from vllm_recycle.integration.options.limits import Schedule
from vllm_recycle.integration.options.trunk import check_trunk, length_of

TOKEN_RECYCLING = "token_recycling"
DYNAMIC = "dynamic"
# With their roots 81 rows; on a GPU 64, and 32, 16, ... where there are fewer nodes: whole tiles of
# its matrix products.
DYNAMIC_MAX_NODES, DYNAMIC_MAX_NODES_ON_GPU = 80, 63
# What a preset says where the user does not: the paper's matrix and tree, verified whole. Nor does
# the text of a prompt enter the matrix.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "tree": "paper-80",
        "contexts": [1],
        "context_mib": 1,  # nothing is found by a hash
        "scope": "shared",
        "row_cost": 0.0,
    }
}
GAMMA, MAX_GAMMA = 4, 16  # tokens that a draft model of our own drafts


@dataclass(frozen=True, kw_only=True)
class TokenRecyclingOptions(SharedOptions):
    """The options of `token_recycling`, and of `ouroboros` along the trunk of its draft model.

    Attributes:
        preset: a name of `PRESETS`, whose values stand for the keys that are not given.
        k: successors kept for each context.
        tree: `dynamic` for trees that are grown best first; or a template that is filled, by the
            name of a shipped one or the path of its file.
        max_nodes: the most nodes of a tree that is grown; of a template, keep only this prefix;
            None where the user says nothing.
        default_nodes: those of a tree that is grown, where the user says nothing.
        contexts: lengths of the contexts that entries are kept for, ascending from 1.
        context_mib: MiB of the entries of longer contexts.
        scope: who reads and writes what, see `AdjacencyMatrix`.
        state_file: with what requests share.
    """

    state_key = "matrix_file"
    takes_texts, keeps_places = True, False

    method: str = TOKEN_RECYCLING
    preset: str | None = None
    k: int = 8
    tree: str = DYNAMIC
    max_nodes: int | None = None
    default_nodes: int = DYNAMIC_MAX_NODES
    contexts: Sequence[int] = (1, 2, 4, 16)
    context_mib: int = 64
    scope: str = "sequence"

    @classmethod
    def keys(cls, method: str) -> tuple[str, ...]:
        names = ("preset", "k", "tree", "max_nodes", "contexts", "context_mib", "scope")
        source = (*DRAFT_MODEL_KEYS, "gamma") if method == OUROBOROS else ("trunk",)
        return (*names, cls.state_key, *SHARED_KEYS, LENGTH, *source)

    @classmethod
    def _field_values(cls, values: dict[str, Any], *, on_gpu: bool) -> dict[str, Any]:
        maxima = {key: values.pop(key) for key in ("max_nodes", LENGTH) if key in values}
        for key, limit in maxima.items():
            expect(key, limit, is_int(limit, 1, MAX_NODES), f"an integer 1 to {MAX_NODES}")
        if (preset := values.get("preset")) is not None:
            is_preset = isinstance(preset, str) and preset in PRESETS
            expect("preset", preset, is_preset, f"one of {list(PRESETS)}")
            values = PRESETS[preset] | values
        if values["method"] == OUROBOROS:
            gamma = values.pop("gamma", GAMMA)
            expect("gamma", gamma, is_int(gamma, 1, MAX_GAMMA), f"an integer 1 to {MAX_GAMMA}")
            values["trunk"][LENGTH] = gamma
        nodes = DYNAMIC_MAX_NODES_ON_GPU if on_gpu else DYNAMIC_MAX_NODES
        return values | {"max_nodes": min(maxima.values(), default=None), "default_nodes": nodes}

    def check(self) -> None:
        super().check()
        expect("k", self.k, is_int(self.k, 1, 64), "an integer 1 to 64")
        expect("tree", self.tree, isinstance(self.tree, str), "a name or a path")
        expect("contexts", self.contexts, isinstance(self.contexts, list | tuple), "a list")
        are_lengths = all(is_int(length, 1, MAX_CONTEXT) for length in self.contexts)
        ascend = are_lengths and list(self.contexts) == sorted({1, *self.contexts})
        expected = f"lengths ascending from 1 to at most {MAX_CONTEXT}, such as [1, 2, 3, 4]"
        expect("contexts", self.contexts, ascend, expected)
        expect("scope", self.scope, self.scope in SCOPES, f"one of {list(SCOPES)}")
        is_size = is_int(self.context_mib, 1, 65536)
        expect("context_mib", self.context_mib, is_size, "an integer 1 to 65536")
        if self.state_file is not None and self.isolates:
            raise ValueError(
                "speculative_config: matrix_file is given with scope 'isolated', expected another "
                "scope: no request reads what is shared"
            )
        if self.trunk is not None:
            self._check_trunk()

    def _check_trunk(self) -> None:
        choices = "of a draft model"
        if not self.has_own_model:
            check_trunk(self.trunk)
            choices = "at a place of it"
        expect("tree", self.tree, self.tree == DYNAMIC, f"{DYNAMIC!r} with a trunk")
        expect("k", self.k, self.k >= CHOICES, f"at least the {CHOICES} choices {choices}")

    @property
    def seeds_from_prompts(self) -> bool:
        """Whether the text of a prompt enters the matrix."""
        return self.preset is None

    @property
    def is_dynamic(self) -> bool:
        return self.tree == DYNAMIC

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.tree == CHAIN:
            return (CHAINS,)
        # With a cost of the user's, a chain promises no more than the tree that it is a part of.
        return (TREES, CHAINS) if self.is_dynamic and self.row_cost is None else (TREES,)

    @property
    def num_nodes(self) -> int:
        return self.max_nodes or self.default_nodes if self.is_dynamic else super().num_nodes

    @property
    def trunk_length(self) -> int:
        """The most tokens of a trunk, where there is one."""
        return 0 if self.trunk is None else min(length_of(self.trunk), self.num_nodes)

    @property
    def copies(self) -> bool:
        """Whether a request's own text is copied from."""
        return self.tree in (DYNAMIC, CHAIN)

    @property
    def max_depth(self) -> int:
        if not self.is_dynamic:
            return self.load_tree().depth
        # A draft model reads, in its first forward, what may have been accepted.
        return min(LEVELS, self.num_nodes) if self.has_own_model else self.num_nodes

    def max_draft_rows(self, table: Schedule, max_num_reqs: int, *, on_gpu: bool) -> int:
        """The most rows of a draft forward of our own, beside what it catches up with on a CPU."""
        # On a GPU of one request; more are drafted for as there is room.
        return self.head_length if on_gpu else 2 * self.trunk_length

    def as_chains(self, longest: int, *, default: int) -> Self:
        nodes = min(self.max_nodes or default, longest, MAX_CHAIN)
        return replace(self, tree=CHAIN, max_nodes=max(1, nodes))

    def load_tree(self) -> TreeTemplate:
        """The template; raises ValueError if there is no such tree, or it does not fit k."""
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

    def make_state(self, vllm_config: Any, device: torch.device | str) -> TokenRecyclingState:
        """What an engine will learn into, empty. On the device `meta` it takes no memory."""
        matrix = AdjacencyMatrix(
            vllm_config.model_config.get_vocab_size(),
            self.k,
            contexts=self.contexts,
            slots=slots_in(self.context_mib, self.k),
            scope=self.scope,  # type: ignore[arg-type]
            max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
            device=device,
        )
        return TokenRecyclingState(matrix)

    def schedule(self, *, on_gpu: bool, max_num_batched_tokens: int | None) -> Schedule:
        """Nodes of a tree by the size of the batch, where the user gives no table."""
        num_nodes = self.num_nodes
        if on_gpu:
            return limits.halving_schedule(num_nodes, limits.MAX_TREE_ROWS)
        # One size for every batch, cut by our scheduler. Said explicitly, since vLLM otherwise
        # pads a request that just came in to a full draft of -1, and keeps it waiting where that
        # does not fit.
        return [(1, limits.UNLIMITED, num_nodes)]
