"""Draft trees: templates, and the trees of a batch with their depths and masks.

A tree is a flat list of nodes `(parent, rank)`, parents first, so that every prefix of the list
is a tree again. Row 0 is the root (the last token of the text); node j of the list is row
j + 1 and means "the rank-th successor of the token at row `parent`".

Names of dimensions, used in shape comments throughout the package:

    batch   requests in a step                    rows      nodes + 1, the root first
    nodes   draft nodes of a tree                 levels    depths 1 .. depth of the tree
    vocab   vocabulary size                       k         successors kept for each token
    path    depth + 1, rows from the root down

Source: Token Recycling (arXiv 2408.08696), section 3.2 and Figure 5.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_recycle.core.state_file import is_int, read_json, shorten

MAX_NODES = 256
FORMAT = "vllm_recycle.tree/1"
CHAIN, MAX_CHAIN = "chain", 24  # the name of templates whose nodes have one child, and the longest

Node = tuple[int, int]
TABLES = ("parents", "ranks", "depths", "ancestor_mask")  # of a template, on a device
# What the file of a template has: the type of each value, and that in words.
KEYS = {
    "name": (str, "a string"),
    "nodes": (list, "a list of [parent, rank]"),
    "provenance": (dict, "an object"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """The trees of a batch, one for each request; those of a template have stride 0.

    A tree that has fewer nodes than there is room for has rows behind its last one; nobody asks for
    them.

    Attributes:
        parents: int64 [batch, rows]; the root has parent 0.
        depths: int64 [batch, rows]; the root has depth 0.
        ancestor_mask: bool [batch, rows, rows], true where the column is the row or its ancestor.
        depth: no tree has more levels below its root.
        are_chains: whether it is known of all that each node has one child.

    """

    parents: torch.Tensor
    depths: torch.Tensor
    ancestor_mask: torch.Tensor
    depth: int
    are_chains: bool = False

    @classmethod
    def from_parents(cls, parents: torch.Tensor) -> Trees:
        """The trees of these parents, int64 [batch, rows], each before its children."""
        batch, rows = parents.shape
        mask = np.zeros((batch, rows, rows), dtype=bool)
        depths = np.ones((batch, rows), dtype=np.int64)
        mask[:, :, 0], depths[:, 0] = True, 0
        mask.reshape(batch, -1)[:, :: rows + 1] = True
        # Rows that are not below the root itself climb all at once, a level at a time. Indices are
        # into flat arrays of numpy, whose calls cost a third of torch's.
        flat_parents, flat_mask, flat_depths = parents.numpy().ravel(), mask.ravel(), depths.ravel()
        climbers = np.flatnonzero(flat_parents)
        ancestors = flat_parents[climbers]
        while len(climbers):
            flat_mask[climbers * rows + ancestors] = True
            flat_depths[climbers] += 1
            ancestors = flat_parents[climbers - climbers % rows + ancestors]
            is_climbing = ancestors > 0
            climbers, ancestors = climbers[is_climbing], ancestors[is_climbing]
        depth = int(depths.max(initial=0))
        return cls(parents, torch.from_numpy(depths), torch.from_numpy(mask), depth)

    @classmethod
    def from_drafts(cls, parents: Sequence[Sequence[int]]) -> Trees:
        """The trees of drafts, from the parent row of each node of each draft."""
        max_nodes = max(map(len, parents), default=0)
        if all(list(draft_parents) == list(range(len(draft_parents))) for draft_parents in parents):
            return _chains(len(parents), max_nodes)
        table = np.zeros((len(parents), 1 + max_nodes), dtype=np.int64)
        for row, draft_parents in zip(table, parents, strict=True):
            row[1 : 1 + len(draft_parents)] = draft_parents
        return cls.from_parents(torch.from_numpy(table))

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1] - 1

    def select(self, selection: torch.Tensor) -> Trees:
        """Only the trees that an index or a mask chooses."""
        tables = self.parents[selection], self.depths[selection], self.ancestor_mask[selection]
        return Trees(*tables, self.depth)


@dataclass(frozen=True, slots=True, eq=False)
class TreeTemplate:
    """A validated draft tree and every table derived from it.

    Attributes:
        nodes: `(parent row, rank)` of each node, parents first.
        name: what the start-up line and benchmarks call it.
        provenance: where the tree comes from (free-form, kept in the file).
        parents, ranks, depths: int64 [rows]; the root has parent 0, rank 0, depth 0.
        ancestor_mask: bool [rows, rows], true where the column is the row or its ancestor.
        depth: levels below the root.

    Raises:
        ValueError: naming the node and the rule that it breaks.

    """

    nodes: tuple[Node, ...]
    name: str = "unnamed"
    provenance: Mapping[str, Any] = field(default_factory=dict)
    parents: torch.Tensor = field(init=False, repr=False)
    ranks: torch.Tensor = field(init=False, repr=False)
    depths: torch.Tensor = field(init=False, repr=False)
    ancestor_mask: torch.Tensor = field(init=False, repr=False)
    depth: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _validate(self.nodes)
        parents, ranks = torch.tensor([(0, 0), *self.nodes]).T.contiguous()
        trees = Trees.from_parents(parents[None])
        tables = (parents, ranks, trees.depths[0], trees.ancestor_mask[0])
        for name, value in zip((*TABLES, "depth"), (*tables, trees.depth), strict=True):
            object.__setattr__(self, name, value)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def of_batch(self, batch: int) -> Trees:
        """This tree for each request of a batch; the tables are shared."""
        parents, depths = self.parents.expand(batch, -1), self.depths.expand(batch, -1)
        return Trees(parents, depths, self.ancestor_mask.expand(batch, -1, -1), self.depth)

    def prefix(self, num_nodes: int) -> TreeTemplate:
        """The tree of the first `num_nodes` nodes; itself where it has no more than these."""
        if num_nodes >= self.num_nodes:
            return self
        return TreeTemplate(self.nodes[:num_nodes], f"{self.name}[:{num_nodes}]", self.provenance)

    def to(self, device: torch.device | str) -> TreeTemplate:
        """This template with its tables on a device; itself where they are there already."""
        device = torch.device(device)
        if self.parents.device == device:
            return self
        template = copy.copy(self)
        for name in TABLES:
            object.__setattr__(template, name, getattr(self, name).to(device))
        return template

    def check_ranks(self, k: int) -> None:
        """Raise ValueError for the first node whose rank an adjacency matrix of width k lacks."""
        for index, (_, rank) in enumerate(self.nodes):
            if rank >= k:
                raise ValueError(
                    f"tree {self.name!r}, node {index}: rank {rank} is not below k = {k}"
                )

    def save(self, path: str | Path) -> None:
        """Write the tree as JSON: format, name, nodes as [parent row, rank], provenance."""
        content = {
            "format": FORMAT,
            "name": self.name,
            "nodes": [list(node) for node in self.nodes],
            "provenance": dict(self.provenance),
        }
        Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")


def load_tree(source: str | Path) -> TreeTemplate:
    """A shipped template by name, or a template file by path; a ValueError where it is neither."""
    if source == CHAIN:
        return chain(MAX_CHAIN)
    shipped = shipped_trees()
    path = shipped.get(str(source), Path(source))
    try:
        is_file = path.is_file()
    except OSError:  # a name that is too long, a directory that nobody may look into
        is_file = False
    if not is_file:
        raise ValueError(
            f"tree {shorten(source)}: expected one of {sorted([CHAIN, *shipped])} or the path of a "
            "JSON file"
        )
    content = read_json(path, kind="tree file")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"tree file {path}: expected an object with format {FORMAT!r}")
    values: dict[str, Any] = {"name": path.stem, "provenance": {}} | content
    for key, (kind, expected) in KEYS.items():
        if not isinstance(values.get(key), kind):
            raise ValueError(f"tree file {path}: expected {key!r}, {expected}")
    try:
        nodes = (tuple(node) if isinstance(node, list) else node for node in values["nodes"])
        return TreeTemplate(tuple(nodes), values["name"], values["provenance"])
    except ValueError as error:
        raise ValueError(f"tree file {path}: {error}") from error


@cache
def chain(num_nodes: int) -> TreeTemplate:
    """The template of so many nodes, each the likeliest successor of the one before it."""
    return TreeTemplate(tuple((row, 0) for row in range(num_nodes)), CHAIN)


@cache
def _chains(batch: int, num_nodes: int) -> Trees:
    """The trees of a batch whose nodes have one child; the tables are shared."""
    trees = Trees.from_parents(torch.arange(-1, num_nodes).clamp(min=0)[None])
    parents, depths = trees.parents.expand(batch, -1), trees.depths.expand(batch, -1)
    mask = trees.ancestor_mask.expand(batch, -1, -1)
    return Trees(parents, depths, mask, num_nodes, are_chains=True)


def shipped_trees() -> dict[str, Path]:
    """Name -> file of the templates that come with the package."""
    folder = Path(str(resources.files(__package__))) / "trees"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """The children of each row, the root first, from the parent of each node."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for row, parent in enumerate(parents, start=1):
        children[parent].append(row)
    return children


def parents_among(parents: Sequence[int], rows: Sequence[int]) -> list[int]:
    """The parents of some nodes where these are all, from the parent of each node.

    Their `rows` ascend, and each is below one of them or the root.
    """
    place = {0: 0} | {row: index for index, row in enumerate(rows, start=1)}
    return [place[parents[row - 1]] for row in rows]


def depth_of(parents: Sequence[int]) -> int:
    """How many levels there are below the root, from the parent of each node."""
    depths = [0]
    for parent in parents:
        depths.append(1 + depths[parent])
    return max(depths)


def from_rank_paths(
    paths: Iterable[Sequence[int]],
    *,
    name: str = "unnamed",
    provenance: Mapping[str, Any] | None = None,
) -> TreeTemplate:
    """The tree whose nodes are the given rank paths, in the given order, parents first."""
    rows: dict[tuple[int, ...], int] = {(): 0}
    nodes: list[Node] = []
    for path in map(tuple, paths):
        if path[:-1] not in rows:
            raise ValueError(f"rank path {path}: its parent {path[:-1]} has not come before it")
        nodes.append((rows[path[:-1]], path[-1]))
        rows[path] = len(nodes)
    return TreeTemplate(tuple(nodes), name, provenance or {})


def _validate(nodes: Sequence[Node]) -> None:
    if not 1 <= len(nodes) <= MAX_NODES:
        raise ValueError(f"got {len(nodes)} nodes, expected 1 to {MAX_NODES}")
    index_by_node: dict[Node, int] = {}
    for index, node in enumerate(nodes):
        if not (
            isinstance(node, tuple) and len(node) == 2 and all(is_int(value) for value in node)
        ):
            raise ValueError(f"node {index}: got {shorten(node)}, expected [parent row, rank]")
        parent, rank = node
        if not 0 <= rank < MAX_NODES:
            raise ValueError(f"node {index}: rank {rank} is not among 0 to {MAX_NODES - 1}")
        if not 0 <= parent <= index:
            raise ValueError(
                f"node {index}: parent row {parent} has not come before it (expected 0 to {index})"
            )
        if node in index_by_node:
            sibling = index_by_node[node]
            raise ValueError(f"node {index}: same parent and rank as its sibling, node {sibling}")
        index_by_node[node] = index
