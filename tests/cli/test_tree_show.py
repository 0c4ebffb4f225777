"""`vllm-recycle tree show`: the text of a small tree, and of those that are shipped."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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


def test_chains_and_neighbouring_leaves_share_a_line(tmp_path, capsys):
    path, provenance = tmp_path / "small.json", {"source": "a test", "tuned": False}
    from_rank_paths(PATHS, name="small", provenance=provenance).save(path)
    assert main(["tree", "show", str(path)]) == 0
    assert capsys.readouterr().out == TEXT
    assert main(["tree", "show", str(path), "--max-nodes", "5"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("small[:5]: 5 nodes, depth 2, nodes per depth 4 / 1; ")
    assert lines == ["root", "├─ 0 ─ 0", "└─ 1 2 3"]


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
