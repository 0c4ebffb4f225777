"""What a user may write in `--speculative-config` for our methods, and what it means.

Options travel to every process of an engine in `additional_config`, as plain values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_recycle.core.adjacency import SCOPES
from vllm_recycle.core.tree import MAX_NODES, TreeTemplate, load_tree

TOKEN_RECYCLING = "token_recycling"
METHODS = (TOKEN_RECYCLING,)

# The prefix of the default tree that is fastest on CPU, by the benchmark in the README. With the
# root it makes 16 rows, the height of an AMX tile.
CPU_MAX_NODES = 15


@dataclass(frozen=True, slots=True)
class TokenRecyclingOptions:
    """The options of the method `token_recycling`.

    Attributes:
        k: successors kept for each token.
        tree: name of a shipped template, or path of a template file.
        max_nodes: keep only this prefix of the tree; None keeps the default for the device if
            the tree is the default one, and all nodes of any other.
        scope: who reads and writes what, see `AdjacencyMatrix`.
        hot_start: whether a request inherits what earlier ones left in the matrix.
        matrix_file: safetensors file of the shared matrix; read at start-up where it exists,
            written at shutdown.
        seed_from_prompt: whether the bigrams of the prompt enter the matrix.
        budget_share: most of a step's token budget that draft tokens may take, in (0, 1].

    """

    k: int = 8
    tree: str = "default"
    max_nodes: int | None = None
    scope: str = "sequence"
    hot_start: bool = True
    matrix_file: str | None = None
    seed_from_prompt: bool = True
    budget_share: float = 0.5

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> TokenRecyclingOptions:
        """Check the keys and values of a speculative configuration (without its `method`).

        `num_speculative_tokens`, vLLM's word, cuts the tree as `max_nodes` does.

        Raises:
            ValueError: naming the key, what was given and what is accepted.

        """
        values = dict(given)
        num_speculative_tokens = values.pop("num_speculative_tokens", None)
        accepted = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in accepted:
                raise ValueError(
                    f"speculative_config of {TOKEN_RECYCLING}: unknown key {key!r}, expected any "
                    f"of {['method', *accepted, 'num_speculative_tokens']}"
                )
        limits = [values.get("max_nodes"), num_speculative_tokens]
        for key, limit in zip(("max_nodes", "num_speculative_tokens"), limits, strict=True):
            if limit is not None:
                _expect(key, limit, _is_int(limit, 1, MAX_NODES), f"an integer 1 to {MAX_NODES}")
        values["max_nodes"] = min((n for n in limits if n is not None), default=None)
        options = cls(**values)
        options._check()
        return options

    def _check(self) -> None:
        _expect("k", self.k, _is_int(self.k, 1, 64), "an integer 1 to 64")
        _expect("tree", self.tree, isinstance(self.tree, str), "a name or a path")
        _expect("scope", self.scope, self.scope in SCOPES, f"one of {list(SCOPES)}")
        for name in ("hot_start", "seed_from_prompt"):
            value = getattr(self, name)
            _expect(name, value, isinstance(value, bool), "true or false")
        file = self.matrix_file
        _expect("matrix_file", file, file is None or isinstance(file, str), "a path")
        if file is not None:
            path = Path(file)
            usable = path.parent.is_dir() and not path.is_dir()
            _expect("matrix_file", file, usable, "a file in a directory that exists")
        share = self.budget_share
        is_share = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
        _expect("budget_share", share, is_share, "a number above 0, at most 1")
        if self.scope == "shared" and not self.hot_start:
            raise ValueError(
                "speculative_config: hot_start is false with scope 'shared', expected scope "
                "'sequence' or 'isolated': without them a request has nothing else to draft from"
            )

    def load_tree(self, *, on_gpu: bool = False) -> TreeTemplate:
        """The template that these options ask for.

        Args:
            on_gpu: whether the default is that for a GPU; of no account where `max_nodes` is set.

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
        if limit is None:
            on_cpu = self.tree == "default" and not on_gpu
            limit = CPU_MAX_NODES if on_cpu else tree.num_nodes
        tree = tree.prefix(limit)
        tree.check_ranks(self.k)
        return tree


def _is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _expect(key: str, value: Any, valid: bool, expected: str) -> None:
    if not valid:
        raise ValueError(f"speculative_config: {key} is {value!r}, expected {expected}")
