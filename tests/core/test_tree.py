"""Trees: the tables derived from parents and ranks, what is refused, and what is shipped."""

from __future__ import annotations

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import BRIEF, THOROUGH, paths_of, trees
from vllm_recycle.core.tree import (
    FORMAT,
    MAX_NODES,
    Trees,
    TreeTemplate,
    children_of,
    from_rank_paths,
    load_tree,
    parents_among,
    shipped_trees,
)

# What JSON must escape, and what is not ASCII.
TEXT = st.text('a "\\\né', max_size=6)


def rank_paths(tree: TreeTemplate) -> list[str]:
    return ["".join(str(tree.nodes[row - 1][1]) for row in path[1:]) for path in paths_of(tree)[1:]]


# Derived tables.


@THOROUGH
@given(tree=trees())
def test_tables_agree_with_their_definitions(tree):
    rows = range(tree.num_nodes + 1)
    paths = paths_of(tree)
    depths = [len(path) - 1 for path in paths]
    assert [*zip(tree.parents.tolist(), tree.ranks.tolist(), strict=True)] == [(0, 0), *tree.nodes]
    assert tree.depths.tolist() == depths
    assert tree.ancestor_mask.tolist() == [[column in path for column in rows] for path in paths]
    assert children_of(tree.parents[1:].tolist()) == [
        [node for node in rows[1:] if tree.nodes[node - 1][0] == row] for row in rows
    ]
    assert tree.depth == max(depths)


@THOROUGH
@given(tree=trees(max_nodes=12), data=st.data())
def test_parents_among_some_nodes_lead_to_the_same_nodes(tree, data):
    dropped = data.draw(st.sets(st.integers(1, tree.num_nodes)))
    kept = [0]
    for row, (parent, _) in enumerate(tree.nodes, start=1):
        kept += [row] if row not in dropped and parent in kept else []
    parents = parents_among([parent for parent, _ in tree.nodes], kept[1:])
    assert [kept[parent] for parent in parents] == [tree.nodes[row - 1][0] for row in kept[1:]]


@THOROUGH
@given(templates=st.lists(trees(max_nodes=12), min_size=1, max_size=4))
def test_trees_of_drafts_are_those_of_their_templates(templates):
    got = Trees.from_drafts([[parent for parent, _ in tree.nodes] for tree in templates])
    assert got.num_nodes == max(tree.num_nodes for tree in templates)
    assert got.depth == max(tree.depth for tree in templates)
    for index, tree in enumerate(templates):
        rows, alone = tree.num_nodes + 1, got.select(torch.tensor([index]))
        assert alone.parents[0, :rows].equal(tree.parents)
        assert alone.depths[0, :rows].equal(tree.depths)
        assert alone.ancestor_mask[0, :rows, :rows].equal(tree.ancestor_mask)
    # Without drafts all are roots.
    assert Trees.from_drafts([[], []]).ancestor_mask.tolist() == [[[True]]] * 2


def test_a_prefix_has_the_first_nodes_and_says_so_in_its_name():
    tree = TreeTemplate(((0, 0), (0, 1)), "two")
    assert tree.prefix(2) is tree
    assert (tree.prefix(1).nodes, tree.prefix(1).name) == (((0, 0),), "two[:1]")


@BRIEF
@given(tree=trees(k=10))
def test_rank_paths_name_a_tree(tree):
    paths = [tuple(map(int, path)) for path in rank_paths(tree)]
    assert from_rank_paths(paths).nodes == tree.nodes
    with pytest.raises(ValueError, match=r"rank path \(0, 1\): its parent \(0,\)"):
        from_rank_paths([(0, 1), (0,)])


# Files.


@BRIEF
@given(
    tree=trees(),
    name=TEXT,
    provenance=st.dictionaries(TEXT, TEXT | st.integers() | st.none(), max_size=3),
)
def test_a_saved_tree_is_loaded_as_it_was(tmp_path_factory, tree, name, provenance):
    path = tmp_path_factory.mktemp("tree") / "tree.json"
    TreeTemplate(tree.nodes, name, provenance).save(path)
    loaded = load_tree(path)
    assert (loaded.nodes, loaded.name, loaded.provenance) == (tree.nodes, name, provenance)


NO_OBJECT = f"expected an object with format '{FORMAT}'"
NO_NODES = "expected 'nodes', a list of [parent, rank]"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nodes: [[0, 0]]", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        ([[0, 0]], NO_OBJECT),
        ({"format": None}, NO_OBJECT),
        ({"format": "vllm_recycle.tree/0"}, NO_OBJECT),
        ({"nodes": None}, NO_NODES),
        ({"nodes": {"0": 0}}, NO_NODES),
        ({"nodes": [[0, 0], "01"]}, "node 1: got '01', expected [parent row"),
        ({"nodes": [[0, 0], [0, 0]]}, "node 1: same parent and rank"),
        ({"provenance": "me"}, "expected 'provenance', an object"),
    ],
)
def test_a_file_that_is_no_tree_is_refused_by_its_name(tmp_path, content, message):
    path = tmp_path / "tree.json"
    if isinstance(content, dict):  # what differs from a tree, None what it lacks
        changed = {"format": FORMAT, "nodes": [[0, 0]], **content}
        content = {name: value for name, value in changed.items() if value is not None}
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(
        ValueError, match=f"{re.escape(f'tree file {path}: ')}.*{re.escape(message)}"
    ):
        load_tree(path)


def test_an_unknown_name_is_refused_with_the_names_there_are(tmp_path):
    for unknown in ("no-such-tree", tmp_path):
        with pytest.raises(ValueError, match=r"expected one of \['chain', 'default', 'paper-80'\]"):
            load_tree(unknown)


# What is no tree.


def chain(length: int) -> tuple[tuple[int, int], ...]:
    return tuple((row, 0) for row in range(length))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((), f"got 0 nodes, expected 1 to {MAX_NODES}"),
        (chain(MAX_NODES + 1), f"got {MAX_NODES + 1} nodes, expected 1 to {MAX_NODES}"),
        (((1, 0),), "node 0: parent row 1 has not come before it (expected 0 to 0)"),
        (((0, 0), (-1, 0)), "node 1: parent row -1 has not come before it (expected 0 to 1)"),
        (((0, 0), (0, 1), (0, 0)), "node 2: same parent and rank as its sibling, node 0"),
        (((0, 0), (0, -1)), "node 1: rank -1 is not among 0 to 255"),
        (((0, 0), (0, 0, 0)), "node 1: got (0, 0, 0), expected [parent row, rank]"),
        (((0, 0), [0, 1]), "node 1: got [0, 1], expected [parent row, rank]"),
        (((0, 0), (0, 1.0)), "node 1: got (0, 1.0), expected [parent row, rank]"),
        (((0, 0), (0, True)), "node 1: got (0, True), expected [parent row, rank]"),
    ],
)
def test_nodes_that_are_no_tree_are_refused_with_node_and_rule(nodes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TreeTemplate(nodes)
    assert TreeTemplate(chain(MAX_NODES)).depth == MAX_NODES


def test_a_rank_that_the_matrix_lacks_is_refused_with_its_node():
    tree = TreeTemplate(((0, 0), (0, 3), (0, 2)), "wide")
    tree.check_ranks(4)
    with pytest.raises(ValueError, match=r"tree 'wide', node 1: rank 3 is not below k = 3"):
        tree.check_ranks(3)


# Shipped trees.


@pytest.mark.parametrize("name", sorted(shipped_trees()))
def test_shipped_trees_load_with_their_origin(name):
    tree = load_tree(name)
    assert tree.provenance
    tree.check_ranks(8)


def test_paper_80_is_the_tree_of_the_paper():
    # How many children each rank path has, where some.
    children = {"": 8, "0": 8, "1": 4, "2": 3, "3": 2, "00": 8, "01": 3, "02": 2, "10": 2}
    children |= {"000": 5, "001": 2, "0000": 3, "00000": 2}
    one = "4 5 6 7 03 04 05 06 07 11 20 30 40 50 002 003 004 010 020 100 200 300 "
    one += "0001 0002 0010 0100 1000 00010"
    children |= dict.fromkeys(one.split(), 1)
    expected = [f"{path}{rank}" for path, count in children.items() for rank in range(count)]
    tree = load_tree("paper-80")
    assert tree.depths.bincount().tolist() == [1, 8, 21, 25, 15, 8, 3]
    assert sorted(rank_paths(tree)) == sorted(expected)


def test_a_template_on_another_device_is_the_same_tree():
    tree = TreeTemplate(((0, 0), (0, 1), (1, 0)), "small")
    moved = tree.to("meta")
    assert (moved.nodes, moved.name, moved.depth) == (tree.nodes, "small", 2)
    tables = [moved.parents, moved.ranks, moved.depths, moved.ancestor_mask]
    assert {table.device.type for table in tables} == {"meta"}
    assert tree.parents.device.type == "cpu"
    assert tree.to("cpu") is tree
