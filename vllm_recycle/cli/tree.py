"""`vllm-recycle tree show`: a draft tree as text.

    vllm-recycle tree show default
    vllm-recycle tree show my_tree.json --max-nodes 24

A node is shown by its rank: "the rank-th successor of the token above", 0 the most likely one.
Trees themselves are made and checked in `vllm_recycle.core.tree`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from vllm_recycle.cli import UsageError
from vllm_recycle.cli.bench.arguments import positive
from vllm_recycle.core.tree import TreeTemplate, children_of, load_tree


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `tree` to the command."""
    parser = subparsers.add_parser("tree", help="show a draft tree")
    actions = parser.add_subparsers(dest="action", required=True)
    show = actions.add_parser("show", help="draw a tree as text")
    show.add_argument("tree", metavar="NAME|FILE", help="a shipped tree, or a JSON file")
    show.add_argument(
        "--max-nodes", type=positive, metavar="N", help="only the first N nodes of the list"
    )
    show.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Load the tree and print it."""
    try:
        tree = load_tree(args.tree)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    if args.max_nodes is not None:
        if args.max_nodes > tree.num_nodes:
            raise UsageError(
                f"--max-nodes: got {args.max_nodes}, expected at most the {tree.num_nodes} nodes "
                f"of tree {args.tree!r}"
            )
        tree = tree.prefix(args.max_nodes)
    print(format_tree(tree))
    return 0


def format_tree(tree: TreeTemplate) -> str:
    """One line about the tree, then its nodes.

    A line holds a node and the chain of only children below it, or neighbouring siblings that
    have no children: 80 nodes take 30 lines.
    """
    children = children_of(tree.parents[1:].tolist())
    return "\n".join([describe(tree), "root", *_lines(tree, children, 0, "")])


def describe(tree: TreeTemplate) -> str:
    """Name, nodes, depth, nodes of each depth, provenance."""
    per_depth = " / ".join(map(str, tree.depths.bincount().tolist()[1:]))
    nodes = f"{tree.num_nodes} node{'s' * (tree.num_nodes > 1)}"
    parts = [
        f"{nodes}, depth {tree.depth}, nodes per depth {per_depth}",
        *(f"{key}: {value}" for key, value in tree.provenance.items()),
    ]
    return " ".join(f"{tree.name}: {'; '.join(parts)}".split())


def _lines(tree: TreeTemplate, children: list[list[int]], row: int, indent: str) -> Iterator[str]:
    ranks = tree.ranks.tolist()
    groups = _groups(children, row)
    for index, group in enumerate(groups):
        is_last = index == len(groups) - 1
        is_chain = bool(children[group[0]])
        label = (" ─ " if is_chain else " ").join(str(ranks[node]) for node in group)
        yield f"{indent}{'└─ ' if is_last else '├─ '}{label}"
        yield from _lines(tree, children, group[-1], indent + ("   " if is_last else "│  "))


def _groups(children: list[list[int]], row: int) -> list[list[int]]:
    """What the lines below a row hold: neighbouring leaves, or a chain of only children."""
    groups: list[list[int]] = []
    for child in children[row]:
        if children[child]:
            chain = [child]
            while len(children[chain[-1]]) == 1:
                chain += children[chain[-1]]
            groups.append(chain)
        elif groups and not children[groups[-1][0]]:
            groups[-1].append(child)
        else:
            groups.append([child])
    return groups
