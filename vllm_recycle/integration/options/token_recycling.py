"""The options of the method `token_recycling`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from vllm_recycle.core.adjacency import check_contexts
from vllm_recycle.core.template_matrix import SCOPES
from vllm_recycle.core.tree import MAX_NODES, TreeTemplate, load_tree
from vllm_recycle.integration.draft_limits import MAX_TREE_ROWS, Schedule, halving_schedule
from vllm_recycle.integration.options.base import (
    MethodOptions,
    expect,
    expect_bool,
    expect_file,
    is_int,
)

TOKEN_RECYCLING = "token_recycling"
# The prefix of the default tree that is fastest on CPU, see examples/benchmarks. With the root it
# makes 16 rows, the height of an AMX tile.
CPU_MAX_NODES = 15
DYNAMIC = "dynamic"
DYNAMIC_MAX_NODES = 80


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
        scope: who reads and writes what, see `TemplateMatrix`.
        hot_start: whether a request inherits what earlier ones left in the matrix.
        matrix_file: safetensors file of the shared matrix; read at start-up where it exists,
            written while serving and at shutdown, of each data-parallel rank its own. Or a folder
            of such files, one of each replica.
        seed_from_prompt: whether the text of the prompt enters the matrix.

    """

    method = TOKEN_RECYCLING

    k: int = 8
    tree: str = DYNAMIC
    max_nodes: int | None = None
    contexts: tuple[int, ...] = (1,)
    context_mib: int | None = None
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
                expect(key, limit, is_int(limit, 1, MAX_NODES), f"an integer 1 to {MAX_NODES}")
        if any(limits):
            values["max_nodes"] = min(limit for limit in limits if limit)
        return super().parse(values, on_gpu=on_gpu)

    @classmethod
    def _defaults(cls, given: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
        tree = given.get("tree") or DYNAMIC
        if tree == DYNAMIC:
            return {
                "tree": tree,
                "max_nodes": DYNAMIC_MAX_NODES,
                "contexts": [1, 2, 4, 8],
                "context_mib": 64,
            }
        # A list, as any that travels in JSON.
        is_cut = tree == "default" and not on_gpu
        return {"tree": tree, "max_nodes": CPU_MAX_NODES if is_cut else None, "contexts": [1]}

    def check(self) -> None:
        super().check()
        expect("k", self.k, is_int(self.k, 1, 64), "an integer 1 to 64")
        expect("tree", self.tree, isinstance(self.tree, str), "a name or a path")
        expect("contexts", self.contexts, isinstance(self.contexts, list | tuple), "a list")
        try:
            check_contexts(self.contexts)
        except ValueError as error:
            raise ValueError(f"speculative_config: {error}") from None
        is_size = self.context_mib is None or is_int(self.context_mib, 1, 65536)
        expect("context_mib", self.context_mib, is_size, "an integer 1 to 65536")
        of_grown = {
            "contexts": list(self.contexts) != [1],
            "context_mib": self.context_mib is not None,
            "row_cost": self.row_cost is not None,
            "step_times_file": self.step_times_file is not None,
        }
        for key, given in of_grown.items():
            if given and not self.is_dynamic:
                raise ValueError(
                    f"speculative_config: {key} belongs to the tree 'dynamic', got {self.tree!r}"
                )
        expect("scope", self.scope, self.scope in SCOPES, f"one of {list(SCOPES)}")
        for name in ("hot_start", "seed_from_prompt"):
            expect_bool(name, getattr(self, name))
        expect_file("matrix_file", self.matrix_file, may_be_folder=True)
        if self.matrix_file is not None and self.isolates and self.is_dynamic:
            raise ValueError(
                "speculative_config: matrix_file is given with scope 'isolated' and the tree "
                "'dynamic', expected a template or another scope: no request reads what is shared"
            )
        if self.scope == "shared" and not self.hot_start:
            raise ValueError(
                "speculative_config: hot_start is false with scope 'shared', expected scope "
                "'sequence' or 'isolated': without them a request has nothing else to draft from"
            )

    @property
    def state_file(self) -> str | None:
        return self.matrix_file

    @property
    def is_dynamic(self) -> bool:
        return self.tree == DYNAMIC

    @property
    def isolates(self) -> bool:
        return self.scope == "isolated"

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
        drafter = (
            "token_recycling.TokenRecyclingV1Drafter"
            if self.is_dynamic
            else "drafter.TreeV1Drafter"
        )
        return {"model": f"vllm_recycle.integration.cpu.{drafter}"}

    def schedule(self, *, on_gpu: bool, max_num_batched_tokens: int | None) -> Schedule:
        num_nodes = self.num_nodes
        if on_gpu:
            return halving_schedule(num_nodes, MAX_TREE_ROWS)
        # One size for every batch, cut by our scheduler. Said explicitly, since vLLM otherwise
        # pads a request that just came in to a full draft of -1, and keeps it waiting where that
        # does not fit.
        return [(1, 1 << 20, num_nodes)]
