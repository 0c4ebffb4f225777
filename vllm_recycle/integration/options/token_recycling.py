"""The options of the method `token_recycling`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from vllm_recycle.core.adjacency import check_contexts, check_scope
from vllm_recycle.core.curve import CHAINS, TREES
from vllm_recycle.core.state_file import is_int
from vllm_recycle.core.tree import CHAIN, MAX_CHAIN, MAX_NODES, TreeTemplate, load_tree
from vllm_recycle.integration import draft_limits
from vllm_recycle.integration.draft_limits import Schedule
from vllm_recycle.integration.options.base import MethodOptions, expect

TOKEN_RECYCLING = "token_recycling"
DYNAMIC = "dynamic"
# With their roots 81 rows; on a GPU 64, and 32, 16, ... where there are fewer nodes: whole tiles of
# its matrix products.
DYNAMIC_MAX_NODES, DYNAMIC_MAX_NODES_ON_GPU = 80, 63
# What a preset says where the user does not: the paper's matrix and tree, verified whole.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "tree": "paper-80",
        "contexts": [1],
        "context_mib": 1,  # nothing is found by a hash
        "scope": "shared",
        "seed_from_prompt": False,
        "row_cost": 0.0,
    }
}


@dataclass(frozen=True, kw_only=True)
class TokenRecyclingOptions(MethodOptions):
    """The options of the method `token_recycling`.

    Attributes:
        preset: a name of `PRESETS`, whose values stand for the keys that are not given.
        k: successors kept for each context.
        tree: `dynamic` for trees that are grown best first; or a template that is filled, by the
            name of a shipped one or the path of its file.
        max_nodes: the most nodes of a tree that is grown; of a template, keep only this prefix.
        contexts: lengths of the contexts that entries are kept for, ascending from 1.
        context_mib: MiB of the entries of longer contexts.
        scope: who reads and writes what, see `AdjacencyMatrix`.
        matrix_file: safetensors file of what requests share; read at start-up where it exists,
            written while serving and at shutdown, of each data-parallel rank its own. Or a folder
            of such files, one of each replica.
        seed_from_prompt: whether the text of the prompt enters the matrix.
    """

    method = TOKEN_RECYCLING
    state_key = "matrix_file"
    other_keys: ClassVar[tuple[str, ...]] = (
        "num_speculative_tokens",
        "trunk",
    )  # see `HostedTrunkOptions`

    preset: str | None = None
    k: int = 8
    tree: str = DYNAMIC
    max_nodes: int | None = None
    contexts: tuple[int, ...] = (1, 2, 4, 16)
    context_mib: int = 64
    scope: str = "sequence"
    matrix_file: str | None = None
    seed_from_prompt: bool = True

    @classmethod
    def _own(cls, config: dict[str, Any]) -> dict[str, Any]:
        names = ("max_nodes", "num_speculative_tokens")
        limits = {key: config[key] for key in names if key in config}
        for key, limit in limits.items():
            expect(key, limit, is_int(limit, 1, MAX_NODES), f"an integer 1 to {MAX_NODES}")
        own = {key: value for key, value in config.items() if key not in limits}
        return own | ({"max_nodes": min(limits.values())} if limits else {})

    @classmethod
    def _defaults(cls, config: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
        # A list of contexts, as any that travels in JSON.
        defaults = {"tree": DYNAMIC, "contexts": [1, 2, 4, 16], "context_mib": 64}
        if (preset := config.get("preset")) is not None:
            is_preset = isinstance(preset, str) and preset in PRESETS
            expect("preset", preset, is_preset, f"one of {list(PRESETS)}")
            defaults |= PRESETS[preset]
        if config.get("tree", defaults["tree"]) == DYNAMIC:
            defaults["max_nodes"] = DYNAMIC_MAX_NODES_ON_GPU if on_gpu else DYNAMIC_MAX_NODES
        return defaults

    def check(self) -> None:
        super().check()
        expect("k", self.k, is_int(self.k, 1, 64), "an integer 1 to 64")
        expect("tree", self.tree, isinstance(self.tree, str), "a name or a path")
        expect("contexts", self.contexts, isinstance(self.contexts, list | tuple), "a list")
        try:
            check_contexts(self.contexts)
            check_scope(self.scope)
        except ValueError as error:
            raise ValueError(f"speculative_config: {error}") from None
        is_size = is_int(self.context_mib, 1, 65536)
        expect("context_mib", self.context_mib, is_size, "an integer 1 to 65536")
        seeds = self.seed_from_prompt
        expect("seed_from_prompt", seeds, isinstance(seeds, bool), "true or false")
        if self.matrix_file is not None and self.isolates:
            raise ValueError(
                "speculative_config: matrix_file is given with scope 'isolated', expected another "
                "scope: no request reads what is shared"
            )

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
    def isolates(self) -> bool:
        return self.scope == "isolated"

    @property
    def num_nodes(self) -> int:
        if self.is_dynamic:
            assert self.max_nodes is not None
            return self.max_nodes
        return super().num_nodes

    def as_chains(self, longest: int) -> Self:
        """The same in chains of at most so many nodes, where trees do not go."""
        return replace(self, tree=CHAIN, max_nodes=max(1, min(self.num_nodes, longest, MAX_CHAIN)))

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

    def schedule(self, *, on_gpu: bool, max_num_batched_tokens: int | None) -> Schedule:
        num_nodes = self.num_nodes
        if on_gpu:
            return draft_limits.halving_schedule(num_nodes, draft_limits.MAX_TREE_ROWS)
        # One size for every batch, cut by our scheduler. Said explicitly, since vLLM otherwise
        # pads a request that just came in to a full draft of -1, and keeps it waiting where that
        # does not fit.
        return [(1, draft_limits.UNLIMITED, num_nodes)]
