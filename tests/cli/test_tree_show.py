"""`vllm-recycle tree show`: the text of a small tree, the picture, refused input."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.cli.commands import refused
from vllm_recycle.cli import main
from vllm_recycle.core.tree import from_rank_paths, load_tree

PATHS = [(0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 0, 0), (0, 1, 0), (0, 1, 1)]
TEXT = """\
small: 11 nodes, depth 3, nodes per depth 4 / 4 / 3; source: a test; tuned: False
root
├─ 0
│  ├─ 0
│  ├─ 1
│  │  └─ 0 1
│  └─ 2
├─ 1 ─ 0 ─ 0
└─ 2 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.json"
    provenance = {"source": "a test", "tuned": False}
    from_rank_paths(PATHS, name="small", provenance=provenance).save(path)
    return path


def test_chains_and_neighbouring_leaves_share_a_line(file, capsys):
    assert main(["tree", "show", str(file)]) == 0
    assert capsys.readouterr().out == TEXT


def test_max_nodes_shows_a_prefix(file, capsys):
    assert main(["tree", "show", str(file), "--max-nodes", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("small[:5]: 5 nodes, depth 2, nodes per depth 4 / 1; ")
    assert lines[1:] == ["root", "├─ 0 ─ 0", "└─ 1 2 3"]


def test_a_reader_that_leaves_ends_it_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "vllm_recycle", "tree", "show", "paper-80"]
    with os.fdopen(writing, "wb") as output:
        result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize("name", ["default", "paper-80"])
def test_the_text_of_a_shipped_tree_has_every_node(name, capsys):
    assert main(["tree", "show", name]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    ranks = [int(word) for line in lines for word in line.split() if word.isdecimal()]
    assert sorted(ranks) == sorted(load_tree(name).ranks[1:].tolist())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["missing.json"],
            "expected one of ['chain', 'default', 'paper-80'] or the path of a JSON file",
        ),
        (["paper-80", "--max-nodes=81"], "got 81, expected at most the 80 nodes"),
        (["paper-80", "--max-nodes=0"], "got '0', expected an integer of at least 1"),
        ([], "the following arguments are required"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, capsys):
    assert message in refused(["tree", "show", *arguments], capsys)
